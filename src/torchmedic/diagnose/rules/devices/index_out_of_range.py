"""An index is outside the range of the table.

What: an embedding, `index_select`, `gather`, `one_hot` or `x[index]` selects rows by number. A table of N rows has the
rows 0 to N - 1 (indexing with brackets also accepts -N to -1).

Why: a token that is not in the vocabulary, a sequence longer than the position table, an id that starts at 1, -1 used
as padding, or an index made for another tensor. On a GPU the same mistake destroys the CUDA context and is reported at
another line.

Cure: build the table for the highest index plus one, cut the sequence, or correct the index where it is made.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from torchmedic.diagnose.cures.ranges import RangeCures
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count, made_here
from torchmedic.evidence.dataset_item import items_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.whole_number_makers import blamed, held_numbers, line_of_stray
from torchmedic.records import Location
from torchmedic.replay.trace.values import Strays, is_whole, outside, readable, span
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import UNKNOWN, Call, raising_call, read
from torchmedic.source.lookup.layers import table_built_at
from torchmedic.source.lookup.origins import user_argument

# name -> (position of the dimension, of the index, whether -1 counts from the end), the table being argument 0
_ALONG = {
    "index_select": (1, 2, False),
    "gather": (1, 2, False),
    "scatter": (1, 2, False),
    "scatter_add": (1, 2, False),
    "scatter_reduce": (1, 2, False),
    "index_add": (1, 2, False),
    "index_copy": (1, 2, False),
    "index_reduce": (1, 2, False),
    "index_fill": (1, 2, True),
    "select": (1, 2, True),
    "take_along_dim": (2, 1, True),
}
_FLAT = frozenset({"take", "put"})
NO_BOUND = 1 << 62


_MARKERS = {-1: "a usual marker for padding", -100: "which losses leave out (`ignore_index`), and no other operation"}


@rule("TM302", "index-out-of-range")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not (evidence.kinds & {"IndexError", "RuntimeError"}):
        return None
    for lookup in lookup_of(evidence.frames):
        index = readable(lookup.index)
        if index is None or not is_whole(index):
            continue
        strays = outside(index, -lookup.bound if lookup.wraps else 0, lookup.bound)
        if strays is not None:
            return _proven(evidence, lookup, index, strays)
    return _from_message(evidence)


def _proven(evidence: RaisedEvidence, lookup: Lookup, index: torch.Tensor, strays: Strays) -> Draft:
    valid = (
        f"{-lookup.bound if lookup.wraps else 0} to {lookup.bound - 1}" if lookup.bound < NO_BOUND else "0 and above"
    )
    if len(strays.distinct) == 1:
        times = f" ({strays.count} times)" if strays.count > 1 else ""
        message = f"index {strays.listed}{times} is out of range: {lookup.table_words}"
    else:
        message = f"{strays.count} indices are out of range: {lookup.table_words}"
    passed = user_argument(evidence.frames, lookup.index)
    items = items_of(evidence.incident, index, strays.positions)
    item = f" (dataset item {items[0]})" if items else ""
    first = strays.at(passed[1].text if passed is not None and passed[1].text.isidentifier() else "index")
    draft = check.draft(evidence, "proven", message, f"`{first}`{item} is {strays.values[0]}; valid is {valid}")
    built = table_built_at(evidence.frames, lookup.table, lookup.layer, f"{lookup.size_words}, set here")
    # A library looks up what it has read itself: the line that starts the library is innocent.
    is_setting = built is not None and passed is None and evidence.is_in_library
    cause = _cause(evidence, lookup, index, strays, built)
    if cause is None and is_setting and built is not None:
        cause = msgspec.structs.replace(built, role="cause")
    label = f"index {strays.values[0]} meets {lookup.size_words}"
    draft.at(cause, *evidence.at_user_line("cause" if cause is None else "surfaced", label))
    draft.at(made_here(evidence, lookup.index, "comes from", whole=True), built)
    extent = span(index)
    if extent is not None and strays.total > 1:
        verb = "is" if strays.count == 1 else "are"
        many = f": {strays.listed}" if strays.count > 1 else ""
        draft.because(
            f"{strays.count} of {strays.total} indices {verb} out of range{many}; "
            f"all of them run from {extent[0]} to {extent[1]}"
        )
    if len(items) > 1:
        draft.because(f"the dataset items with such an index: {listed([str(each) for each in items], 8)}")
    _advise(draft, lookup, index, strays, RangeCures(evidence))
    return draft


def _cause(
    evidence: RaisedEvidence, lookup: Lookup, index: torch.Tensor, strays: Strays, built: Location | None
) -> Location | None:
    """The line that made the indices, or the table, where the values show which is wrong; else None."""
    marker = len(strays.distinct) == 1 and strays.distinct[0] in _MARKERS
    length = index.shape[-1] if index.dim() else 0
    if lookup.layer is None or marker or (length > lookup.bound and _are_positions(index, length)):
        return None
    held = held_numbers(evidence.frames, evidence.incident, index, strays)
    blame = blamed(index if held is None else held.values, lookup.bound, strays.distinct, from_one="table")
    if blame == "table":
        return msgspec.structs.replace(built, role="cause") if built is not None else None
    label = f"index {strays.values[0]} comes from here"
    return line_of_stray(evidence.frames, evidence.incident, index, strays, label, held) if blame == "data" else None


def _advise(draft: Draft, lookup: Lookup, index: torch.Tensor, strays: Strays, cures: RangeCures) -> None:
    """Give only advice that the values of this index support."""
    bound, bad = lookup.bound, strays.distinct
    length = index.shape[-1] if index.dim() else 0
    treatment = None
    if lookup.layer is not None and length > bound and _are_positions(index, length):
        draft.because(f"the indices are the positions 0 to {length - 1}: the sequence is {length} long")
        title = f"cut the sequence to {bound}, or build the table for {length} positions"
        treatment = cures.larger(title, lookup.layer, bound, length)
    elif len(bad) == 1 and bad[0] in _MARKERS:
        draft.because(f"the only value out of range is {bad[0]}, {_MARKERS[bad[0]]}")
        title = f"replace {bad[0]} by an index that is in range, and mask the result"
        treatment = cures.argument(title, lookup.index, "{}.clamp(min=0)", safety="changes-training")
    elif lookup.op in ("embedding", "embedding_bag"):
        rows = max([*bad, bound]) + 1
        title = f"build the table for {rows} rows if {rows - 1} is a valid index, or correct the index"
        treatment = cures.larger(title, lookup.layer, bound, rows) if min(bad) >= 0 else None
    else:
        title = "correct the index where it is made, or give the indexed tensor the size that was meant"
    draft.treat(treatment) if treatment is not None else draft.help(title)


def _are_positions(index: torch.Tensor, length: int) -> bool:
    row = index.reshape(-1, length)[0]
    return torch.equal(row, torch.arange(length, dtype=row.dtype))


def _from_message(evidence: RaisedEvidence) -> Draft | None:
    """The index cannot be read, but torch has named it."""
    named = re.search(r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)", evidence.message)
    if named is not None:
        value, _, size = named.groups()
        message = f"index {value} is out of range for a dimension of size {size}"
        cause = f"torch names the index {value} and the size {size}; the index itself could not be read"
        label = f"index {value} meets size {size}"
    elif evidence.says("index out of range in self"):
        message = "an index is out of range for the table that it is looked up in"
        cause, label = "torch says so; the index itself could not be read", "index out of range"
    else:
        return None
    draft = check.draft(evidence, "likely", message, cause)
    draft.at(*evidence.at_user_line("cause", label))
    return draft.help("correct the index where it is made, or make the table larger")


class Lookup(msgspec.Struct, frozen=True, kw_only=True):
    """One index into one dimension of one table."""

    op: str
    table: Any
    index: torch.Tensor
    bound: int
    wraps: bool = False
    layer: torch.nn.Module | None = None
    # The table and its size in words: "the `Embedding` has 20 rows", and beside an index: "20 rows".
    table_words: str
    size_words: str


def lookup_of(frames: list[Frame]) -> list[Lookup]:
    """The lookups of the operation that raised; several if several dimensions were indexed at once."""
    if not frames:
        return []
    last = frames[-1]
    if last.function in ("embedding", "embedding_bag") and not last.is_user:
        return _embedding(frames, last.variables.get("weight"), last.variables.get("input"), last.function)
    call = raising_call(last)
    if call is None:
        return []
    op = call.op.rstrip("_")
    if op in ("index", "index_put"):
        return list(_subscript(call))
    if op in ("embedding", "embedding_bag"):
        table, index = (call.get(0, "weight"), call.get(1, "indices"))
        if isinstance(table, torch.Tensor) and table.dim() != 2:  # `F.embedding(index, table)`, not `torch.embedding`
            table, index = index, table
        return _embedding(frames, table, index, op)
    if op == "one_hot":
        classes = call.get(1, "num_classes")
        index = call.get(0, "tensor")
        if isinstance(index, torch.Tensor):
            given = classes if isinstance(classes, int) and classes > 0 else None
            words = f"{given} classes" if given is not None else "no negative index"
            return [
                Lookup(
                    op=op,
                    table=None,
                    index=index,
                    bound=given if given is not None else NO_BOUND,
                    table_words=f"`one_hot` takes {words}",
                    size_words=words,
                )
            ]
        return []
    return list(_along(call, op))


def _embedding(frames: list[Frame], table: Any, index: Any, op: str) -> list[Lookup]:
    if not (isinstance(table, torch.Tensor) and isinstance(index, torch.Tensor)) or table.dim() != 2:
        return []
    layer = frames[-2].module if len(frames) > 1 else None
    named = isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.weight is table
    rows = int(table.shape[0])
    words = count(rows, "row")
    return [
        Lookup(
            op=op,
            table=table,
            index=index,
            bound=rows,
            layer=layer if named else None,
            table_words=(f"the `{type(layer).__name__}`" if named else "the table") + f" has {words}",
            size_words=words,
        )
    ]


def _along(call: Call, op: str) -> Iterator[Lookup]:
    table = call.get(0, "input")
    if not isinstance(table, torch.Tensor):
        return
    if op in _FLAT:
        index = call.get(1, "index")
        if isinstance(index, torch.Tensor):
            words = f"{table.numel()} elements"
            yield Lookup(
                op=op,
                table=table,
                index=index,
                bound=table.numel(),
                wraps=True,
                table_words=f"the tensor has {words}",
                size_words=words,
            )
        return
    if op not in _ALONG:
        return
    at_dim, at_index, wraps = _ALONG[op]
    dim, index = call.get(at_dim, "dim"), call.get(at_index, "indices" if op == "take_along_dim" else "index")
    if isinstance(index, int):
        index = torch.tensor(index)
    if isinstance(dim, int) and isinstance(index, torch.Tensor) and -table.dim() <= dim < table.dim():
        yield _in_dimension(op, table, index, dim % table.dim(), wraps=wraps)


def _in_dimension(op: str, table: torch.Tensor, index: torch.Tensor, dim: int, *, wraps: bool) -> Lookup:
    size = int(table.shape[dim])
    return Lookup(
        op=op,
        table=table,
        index=index,
        bound=size,
        wraps=wraps,
        table_words=f"dimension {dim} of {list(table.shape)} has size {size}",
        size_words=f"size {size}",
    )


def _subscript(call: Call) -> Iterator[Lookup]:
    """`x[i]`, `x[:, index]`, `x[rows, columns] = y`: one lookup per indexed dimension."""
    table, index = (argument.value for argument in call.arguments[:2])
    if not isinstance(table, torch.Tensor):
        return
    parts = list(index) if isinstance(index, tuple) else [index]
    node = call.arguments[1].node
    if index is UNKNOWN and isinstance(node, ast.Tuple):
        # One part that cannot be read (a call) does not hide the others.
        parts = [read(element, call.frame) for element in node.elts]
    taken = sum(_dimensions(part) for part in parts)
    dim = 0
    for part in parts:
        if part is Ellipsis:
            dim += table.dim() - taken
            continue
        whole = _as_index(part)
        if whole is not None and dim < table.dim():
            yield _in_dimension("[]", table, whole, dim, wraps=True)
        dim += _dimensions(part)


def _dimensions(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def _as_index(part: Any) -> torch.Tensor | None:
    if isinstance(part, torch.Tensor):
        return None if part.dtype in (torch.bool, torch.uint8) else part
    if isinstance(part, bool) or not isinstance(part, int | list | tuple | range):
        return None
    try:
        return torch.as_tensor(list(part) if isinstance(part, range) else part)
    except (ValueError, TypeError, RuntimeError):
        return None
