"""The last examination of a process that made no progress, kept for the report: `stall[.<rank>].json`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmedic.records import encode
from torchmedic.records.stall import Stall
from torchmedic.runfolder import reading
from torchmedic.runfolder.confidential import is_confidential
from torchmedic.runfolder.files import write_atomically

_MAX_BYTES = 8 << 20


def write_stall(run: Path, stall: Stall, rank: int | None = None) -> None:
    """Keep an examination. It holds source text and command lines, so a confidential run keeps none."""
    if not is_confidential(run):
        write_atomically(run / ("stall.json" if rank is None else f"stall.{rank}.json"), encode(stall))


def read_stalls(run: Path) -> Iterator[Stall]:
    """The last examination of every rank; damaged files are skipped."""
    for path in sorted(run.glob("stall*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            yield reading.decode(reading.read(path, _MAX_BYTES), Stall)
