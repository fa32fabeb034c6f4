"""The files that processes write, and how fast they grow: a process that writes a checkpoint is not hung."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmedic.records.process import FileGrowth, ProcessView
from torchmedic.supervise.proc.open_files import descriptors, mode
from torchmedic.supervise.proc.process import PROC

_MAX_DESCRIPTORS = 256  # per process

Sizes = dict[tuple[int, str], int]


def sizes(pids: Iterable[int], ours: Path, *, proc: Path = PROC) -> Sizes:
    """Sizes of the files that the processes have open for writing, without files below `ours`."""
    found: Sizes = {}
    for pid in pids:
        for descriptor, path in itertools.islice(descriptors(pid, proc=proc), _MAX_DESCRIPTORS):
            if not path.startswith("/") or path.startswith((f"{ours}/", "/dev/", "/proc/")):
                continue
            with contextlib.suppress(OSError):
                status = os.stat(f"{proc}/{pid}/fd/{descriptor}")
                if stat.S_ISREG(status.st_mode) and "w" in mode(pid, descriptor, proc=proc):
                    found[pid, path] = status.st_size
    return found


def with_growth(views: Iterable[ProcessView], before: Sizes, after: Sizes) -> tuple[ProcessView, ...]:
    """Add the files that grew to each process, the fastest first. A new file grew from size 0."""
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
