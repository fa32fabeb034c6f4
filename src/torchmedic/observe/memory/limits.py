"""Limits that a process lives under (`ulimit`), whether one of them refused an allocation, and where it comes from."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from torchmedic.observe.memory.host import HostMemory, text_of

_TITLES = {"RLIMIT_AS": "Max address space", "RLIMIT_DATA": "Max data size", "RLIMIT_MEMLOCK": "Max locked memory"}
_MAX_UNKNOWN_BYTES = 64 << 20  # what a refused allocation of unknown size may well have been
_ARENA_BYTES = 1 << 20  # that the C library asks for where the heap cannot grow
_MAX_PARENTS = 30


class Bound(NamedTuple):
    """A limit that an allocation ran into. Bytes."""

    name: str  # RLIMIT_AS
    option: str  # ulimit -v
    of: str
    limit: int
    taken: int  # when it was refused
    certain: bool  # whether what was asked for is known not to have fitted


class Setter(NamedTuple):
    """The process that has set a limit: this one, or one of those that started it."""

    own: bool
    name: str = ""  # of the outermost process that has the same limit
    pid: int = 0


def refusing(memory: HostMemory, asked: int | None) -> Bound | None:
    """The limit that an allocation exceeded; None where none did, or where the host is too small for it anyway."""
    host = None if memory.total is None else memory.total + (memory.swap or 0)
    if asked is not None and host is not None and (memory.resident or 0) + asked > host:
        return None
    found = []
    for name, option, of, limit, sizes in (
        ("RLIMIT_AS", "ulimit -v", "address space", memory.address_limit, (memory.address_space, memory.address_peak)),
        ("RLIMIT_DATA", "ulimit -d", "private memory", memory.data_limit, (memory.data,)),
    ):
        now = sizes[0]
        if limit is None or now is None:
            continue
        if asked is not None:
            # What the failing code had made by then may be gone again: the most that there ever was counts too. And of
            # small pieces the C library asks the system for many at a time.
            taken = next((each for each in sizes if each is not None and each + max(asked, _ARENA_BYTES) > limit), None)
            if taken is not None:
                found.append(Bound(name, option, of, limit, taken, True))
        elif memory.total is None or limit - now < memory.total:
            found.append(Bound(name, option, of, limit, now, limit - now < _MAX_UNKNOWN_BYTES))
    return min(found, key=lambda each: each.limit - each.taken, default=None)


def setter_of(name: str, limit: int, first: int | None = None, proc: Path = Path("/proc")) -> Setter | None:
    """The process that has set a limit, by the limits of the parent processes; None where they cannot be read.

    Args:
        name: Such as RLIMIT_AS.
        limit: The soft limit of the process that it is about.
        first: The process that started it, by default the parent of this one.
        proc: In place of /proc.
    """
    above = None
    parent = first or _parent(proc, os.getpid())
    for _ in range(_MAX_PARENTS):
        soft = _soft(proc, parent, name) if parent else None
        if soft is None:
            return above
        if soft != limit:
            return above or Setter(own=True)
        above = Setter(own=False, name=text_of(proc / str(parent) / "comm").strip(), pid=parent)
        parent = _parent(proc, parent)
    return above


def mappings(proc: Path = Path("/proc")) -> str:
    """Whether a process has about as many pieces of memory as the kernel lets it have; empty if it has not."""
    most = text_of(proc / "sys" / "vm" / "max_map_count").strip()
    count = text_of(proc / "self" / "maps").count("\n")
    if not most.isdigit() or count < 0.95 * int(most):
        return ""
    return f"its memory is in {count} pieces, and the kernel allows {most} (vm.max_map_count)"


def _parent(proc: Path, pid: int) -> int:
    # Its name may hold anything, brackets too.
    with contextlib.suppress(ValueError, IndexError):
        return int(text_of(proc / str(pid) / "stat").rpartition(")")[2].split()[1])
    return 0


def _soft(proc: Path, pid: int, name: str) -> int | None:
    """-1 for no limit; None where it cannot be read."""
    for line in text_of(proc / str(pid) / "limits").splitlines():
        if line.startswith(_TITLES[name]):
            word = line[len(_TITLES[name]) :].split()[0]
            return int(word) if word.isdigit() else -1
    return None
