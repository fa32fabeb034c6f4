"""A rank that ended by `sys.exit()`: where nothing else is known, its launcher only tells that a process failed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from torchmedic.diagnose.words.death import line_location
from torchmedic.records import Diagnosis
from torchmedic.records.ranks import Leaving
from torchmedic.runfolder import files, layout, reading
from torchmedic.supervise.deaths import ECHOES
from torchmedic.supervise.ranks import rank_of


def with_exit(run: Path, diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis of a launcher's exception, with the rank and the line that ended the process; else as it is."""
    if not diagnosis.cause.startswith(ECHOES):
        return diagnosis
    found: list[tuple[int, Leaving]] = []
    for folder in layout.process_folders(run):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append((rank_of(folder), reading.decode(reading.read(folder / files.LEAVING), Leaving)))
    exits = sorted(((rank, left) for rank, left in found if left.has_failed), key=lambda pair: pair[0])
    if not exits:
        return diagnosis
    rank, left = exits[0]
    return msgspec.structs.replace(
        diagnosis,
        rank=rank,
        message=f"rank {rank}: the script ended by `{left.how}`, and its launcher has ended the others",
        cause="its exit status is not 0: the launcher takes it for a failure",
        locations=(line_location("cause", left.frame.file, left.frame.line, f"rank {rank} left the job here"),),
    )
