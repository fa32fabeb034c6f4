"""A process, its children and theirs, and what changed in them between two looks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import process
from torchmedic.supervise.proc.process import PROC, Stat


def tree(pid: int, *, proc: Path = PROC) -> tuple[ProcessView, ...]:
    """A process first, then its descendants; those whose parent died too, while they stay in its process group."""
    found = [process.read(each, proc=proc) for each in pids(pid, proc=proc)]
    return tuple(view for view in found if view is not None)


def pids(pid: int, *, proc: Path = PROC) -> tuple[int, ...]:
    """The processes of a tree by their numbers: parents before children."""
    if not os.path.exists(f"{proc}/{pid}/stat"):
        return ()
    found: dict[int, None] = {pid: None}
    everyone = None if os.path.exists(f"{proc}/{pid}/task/{pid}/children") else _children_by_parent(proc)
    _collect(pid, everyone, found, proc)
    for orphan in _orphans(pid, found, proc):
        found[orphan] = None
        _collect(orphan, everyone, found, proc)
    return tuple(found)


def _collect(pid: int, everyone: dict[int, list[int]] | None, found: dict[int, None], proc: Path) -> None:
    waiting = [pid]
    while waiting:
        parent = waiting.pop(0)
        for child in _children(parent, proc) if everyone is None else everyone.get(parent, ()):
            if child not in found:
                found[child] = None
                waiting.append(child)


def _children(pid: int, proc: Path) -> list[int]:
    """The kernel keeps them by the thread that made them."""
    found: list[int] = []
    for tid in process.thread_ids(pid, proc=proc):
        found += map(int, (text(f"{proc}/{pid}/task/{tid}/children") or "").split())
    return sorted(found)


def _children_by_parent(proc: Path) -> dict[int, list[int]]:
    """For kernels that keep no list: ask every process for its parent."""
    found: dict[int, list[int]] = {}
    for pid in _everyone(proc):
        if stat := Stat(text(f"{proc}/{pid}/stat") or ""):
            found.setdefault(stat.number(4), []).append(pid)
    return found


def _everyone(proc: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit())
    return []


def _orphans(pid: int, found: dict[int, None], proc: Path) -> list[int]:
    """Children of a dead child: they stay in the process group that the process leads, and init has adopted them.

    Another command of the same pipeline (`python train.py | tee log`) is in that group too, but has our own parent.
    """
    own = Stat(text(f"{proc}/{pid}/stat") or "")
    if not own or own.number(5) != pid:
        return []
    orphans = []
    for each in _everyone(proc):
        if each in found or _group(each, proc) != pid:
            continue
        parent = Stat(text(f"{proc}/{each}/stat") or "").number(4)
        if parent == os.getpid() or (parent != own.number(4) and _adopts(parent, proc)):
            orphans.append(each)
    return orphans


def _group(pid: int, proc: Path) -> int:
    if proc != PROC:
        return Stat(text(f"{proc}/{pid}/stat") or "").number(5)
    with contextlib.suppress(OSError):
        return os.getpgid(pid)  # a fiftieth of the time that the file takes, and it is asked of all processes
    return 0


def _adopts(pid: int, proc: Path) -> bool:
    """Whether this is init, or a service manager of a user right below it."""
    return pid <= 1 or Stat(text(f"{proc}/{pid}/stat") or "").number(4) == 1


def compare_all(before: Iterable[ProcessView], after: Iterable[ProcessView]) -> tuple[ProcessView, ...]:
    """The later look at each process, with its rates; one that is new has none."""
    known = {view.pid: view for view in before}
    return tuple(compare(known[view.pid], view) if view.pid in known else view for view in after)


def compare(before: ProcessView, after: ProcessView) -> ProcessView:
    """The later look, with the rates since the earlier one."""
    seconds = after.taken - before.taken
    if seconds <= 0 or not _same(before, after):
        return after
    earlier = {thread.tid: thread for thread in before.threads}
    # Not by the sum over the threads: one that ended in between would count as negative.
    threads = tuple(_compare_threads(earlier.get(thread.tid), thread, seconds) for thread in after.threads)
    return msgspec.structs.replace(
        after,
        threads=threads,
        elapsed=seconds,
        busy=sum(thread.busy or 0.0 for thread in threads) if after.threads else None,
        major_faults=max(0, after.faults - before.faults) / seconds,
        bytes_read=_rate(before.io, after.io, 0, seconds),
        bytes_written=_rate(before.io, after.io, 1, seconds),
    )


def _same(before: ProcessView, after: ProcessView) -> bool:
    """Whether the number was not given to another process in between."""
    return before.pid == after.pid and abs(before.started - after.started) < 1.0


def _compare_threads(before: ThreadView | None, after: ThreadView, seconds: float) -> ThreadView:
    used = after.cpu - (before.cpu if before is not None else 0.0)
    wanted = used + after.waited - (before.waited if before is not None else 0.0)
    times = after.switches - (before.switches if before is not None else 0)
    return msgspec.structs.replace(
        after, busy=max(0.0, used) / seconds, demand=max(0.0, wanted) / seconds, wakes=max(0, times) / seconds
    )


def _rate(before: tuple[int, ...], after: tuple[int, ...], index: int, seconds: float) -> float | None:
    """Bytes a second: through calls (also from memory, pipes), or by the disk (mapped files), if that is more."""
    if not before or not after:
        return None
    through_calls = after[index] - before[index]
    disk = after[index + 2] - before[index + 2]
    return max(0, through_calls, disk) / seconds
