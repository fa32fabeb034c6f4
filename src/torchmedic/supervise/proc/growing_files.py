"""The files that processes write to, and how fast: a checkpoint that grows is no hang."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmedic.records.process import FileGrowth, ProcessView
from torchmedic.supervise.proc.open_files import mode
from torchmedic.supervise.proc.process import PROC

_MOST = 256  # descriptors of a process that are looked at

Sizes = dict[tuple[int, str], int]


def sizes(pids: Iterable[int], ours: Path, *, proc: Path = PROC) -> Sizes:
    """How big the files are that these processes have open for writing; without those below `ours`."""
    found: Sizes = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"{proc}/{pid}/fd")[:_MOST]:
                with contextlib.suppress(OSError, ValueError):
                    path = os.readlink(f"{proc}/{pid}/fd/{entry}")
                    if not path.startswith("/") or path.startswith((f"{ours}/", "/dev/", "/proc/")):
                        continue
                    status = os.stat(f"{proc}/{pid}/fd/{entry}")
                    if stat.S_ISREG(status.st_mode) and "w" in mode(pid, int(entry), proc=proc):
                        found[pid, path] = status.st_size
    return found


def with_growth(views: Iterable[ProcessView], before: Sizes, after: Sizes) -> tuple[ProcessView, ...]:
    """The same processes, with those of their files that grew, the fastest first; a new one grew from nothing."""
    filled = []
    for view in views:
        seconds = view.elapsed or 1.0
        grown = [
            FileGrowth(path=path, size=size, rate=(size - before.get((pid, path), 0)) / seconds)
            for (pid, path), size in after.items()
            if pid == view.pid and size > before.get((pid, path), 0)
        ]
        growing = tuple(sorted(grown, key=lambda file: -file.rate))
        filled.append(msgspec.structs.replace(view, growing=growing) if growing else view)
    return tuple(filled)
