"""The open files of processes, how fast they grow, and the other processes that have them open."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from torchmedic.records.process import FileGrowth, ProcessView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc.process import PROC

_MAX_DESCRIPTORS = 256  # per process

Sizes = dict[tuple[int, str], int]


class OpenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A descriptor of a process."""

    pid: int
    descriptor: int


def target(pid: int, descriptor: int, *, proc: Path = PROC) -> str:
    """The target of a descriptor: a path, `pipe:[inode]` or `socket:[inode]`. Empty if it may not be read."""
    with contextlib.suppress(OSError):
        return os.readlink(f"{proc}/{pid}/fd/{descriptor}")
    return ""


def descriptors(pid: int, *, proc: Path = PROC) -> list[tuple[int, str]]:
    """All descriptors of a process, with their targets."""
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(f"{proc}/{pid}/fd"), key=int):
            with contextlib.suppress(OSError):
                found.append((int(entry), os.readlink(f"{proc}/{pid}/fd/{entry}")))
    return found


def is_named_pipe(pid: int, descriptor: int, *, proc: Path = PROC) -> bool:
    """Whether a descriptor is a named pipe in the file system."""
    with contextlib.suppress(OSError, ValueError):
        return descriptor >= 0 and stat.S_ISFIFO(os.stat(f"{proc}/{pid}/fd/{descriptor}").st_mode)
    return False


def info(pid: int, descriptor: int, *, proc: Path = PROC) -> str:
    return text(f"{proc}/{pid}/fdinfo/{descriptor}") or ""


def mode(pid: int, descriptor: int, *, proc: Path = PROC) -> str:
    """The access mode of a descriptor: `r`, `w` or `rw`; empty if unknown."""
    flags = info(pid, descriptor, proc=proc).partition("flags:")[2].split(maxsplit=1)
    with contextlib.suppress(ValueError, IndexError):
        return ("r", "w", "rw", "")[int(flags[0], 8) & 3]
    return ""


def holders(targets: Collection[str], *, proc: Path = PROC) -> dict[str, list[OpenFile]]:
    """The descriptors with the given targets in all processes that may be read: one walk over the host."""
    found: dict[str, list[OpenFile]] = {each: [] for each in targets if each}
    if not found:
        return found
    with contextlib.suppress(OSError):
        for pid in sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit()):
            for descriptor, link in descriptors(pid, proc=proc):
                if link in found:
                    found[link].append(OpenFile(pid=pid, descriptor=descriptor))
    return found


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
