"""The rows of an autopsy: every heading with its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torchmedic.evidence.memory.autopsy import Autopsy

_OTHERS = "other processes"
_CONTEXT = "CUDA context and libraries"
_UNKNOWN = "CUDA context, libraries, and other processes if any"


class Row(NamedTuple):
    """One line of the table."""

    heading: str
    nbytes: int

    @property
    def is_outside(self) -> bool:
        """Whether the row is in use on the device, but not by the allocator of this process."""
        return self.heading in (_OTHERS, _CONTEXT, _UNKNOWN)


def rows_of(autopsy: Autopsy) -> Iterator[Row]:
    """All rows, also those of 0 bytes; their sum is what was in use."""
    book, measured = autopsy.book, autopsy.measured
    for heading in ("parameters", "buffers", "gradients", "optimizer state", "the batch"):
        yield Row(heading, book.total(heading))
    gone = max(0, measured.allocated - measured.allocated_now) if autopsy.exhaustion.on_device else 0
    lost = min(gone, sum(each.nbytes for each in autopsy.lost)) if autopsy.method == "fake replay" else 0
    yield Row("saved activations", book.total("saved activations") + lost)
    yield Row("temporaries of the failing operation", gone - lost)
    pinned = held = 0
    for memory, found in book.held.values():
        if autopsy.is_of_failing_call(found.holder):
            pinned += memory.nbytes
        else:
            held += memory.nbytes
    older = book.total("held") - pinned - held
    yield Row("other variables of the failing call", pinned)
    yield Row("held by other names", held)
    yield Row("saved by graphs of earlier steps", older)
    yield Row("torchmedic's own", book.total("torchmedic"))
    yield Row("tensors that no name leads to", book.total("not traced"))
    if autopsy.exhaustion.on_device:
        yield from _device_rows(autopsy)
    else:
        yield Row("NumPy arrays", book.total("arrays"))
        rest = max(0, measured.used - book.everything)
        objects = min(rest, book.plain_objects)
        yield Row("Python objects of yours", objects)
        yield Row("Python, libraries and all else that is not a tensor", rest - objects)


def _device_rows(autopsy: Autopsy) -> Iterator[Row]:
    measured = autopsy.measured
    rounding = max(0, measured.allocated_now - (measured.requested or measured.allocated_now))
    yield Row("workspaces of cuBLAS", measured.workspaces)
    yield Row("rounding of the allocator", rounding)
    rest = measured.allocated_now - autopsy.book.everything - measured.workspaces - rounding
    yield Row("not accounted for", max(0, rest))
    yield Row("reserved by the allocator, not in use", measured.cache)
    if measured.others is not None:
        others = min(measured.others, measured.outside)
        yield Row(_OTHERS, others)
        yield Row(_CONTEXT, measured.outside - others)
    else:
        yield Row(_UNKNOWN, measured.outside)


def record_of(autopsy: Autopsy) -> dict[str, Any]:
    """The table as a record for events.jsonl."""
    return {
        "where": autopsy.exhaustion.where,
        "asked": autopsy.asked,
        "total": sum(row.nbytes for row in autopsy.rows),
        "measured": autopsy.measured.used,
        "allocated": autopsy.measured.allocated,
        "reserved": autopsy.measured.reserved,
        "method": autopsy.method,
        "rows": {row.heading: row.nbytes for row in autopsy.rows if row.nbytes},
        "lines": [
            {
                "file": line.spot.file if line.spot is not None else "",
                "line": line.spot.line if line.spot is not None else 0,
                "bytes": line.nbytes,
                "modules": line.modules[:4],
                "node": line.node,
            }
            for line in autopsy.saved_lines[:20]
        ],
    }
