"""The ranks of a job on other hosts, whose logs came through the store of the job."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from torchmedic.detect.ranks import culprit
from torchmedic.records import StackFrame
from torchmedic.records.ranks import RankLog, RankState, RemoteRank
from torchmedic.runfolder import files, reading
from torchmedic.settings import working_folder


def elsewhere(run: Path, here: set[int]) -> list[RankState]:
    """What the ranks on other hosts told; `here` are those of this host."""
    found = []
    for path in sorted((run / files.REMOTE_RANKS).glob("*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            told = reading.decode(reading.read(path), RemoteRank)
            if told.log.rank not in here:
                log = _with_paths_of_here(told)
                skipped = culprit.forward_without_backward(log)
                frame = next(iter(skipped.frames), None) if skipped is not None else None
                found.append(RankState(rank=log.rank, fate=told.fate, log=log, skipped=frame))
    return found


def _with_paths_of_here(told: RemoteRank) -> RankLog:
    """The log of a rank that may work in another folder: files below it are named as they are on this host."""
    there, here = told.folder.rstrip(os.sep) + os.sep, str(working_folder()).rstrip(os.sep) + os.sep
    if there == here or not told.folder:
        return told.log

    def moved(frame: StackFrame) -> StackFrame:
        name = frame.file
        return msgspec.structs.replace(frame, file=here + name[len(there) :]) if name.startswith(there) else frame

    calls = [msgspec.structs.replace(call, frames=tuple(map(moved, call.frames))) for call in told.log.calls]
    return msgspec.structs.replace(told.log, calls=tuple(calls))
