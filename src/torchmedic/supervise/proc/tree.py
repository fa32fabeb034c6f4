"""A process and its descendants, and the changes between two looks at them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import process
from torchmedic.supervise.proc.process import PROC, stat_of


def tree(pid: int, *, proc: Path = PROC) -> tuple[ProcessView, ...]:
    """A process and its descendants, including orphans that are still in its process group."""
    found = [process.read(each, proc=proc) for each in pids(pid, proc=proc)]
    return tuple(view for view in found if view is not None)


def pids(pid: int, *, proc: Path = PROC) -> tuple[int, ...]:
    """The pids of a process and its descendants, parents before children."""
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
    """The children of a process; the kernel lists them by the thread that made them."""
    found: list[int] = []
    for tid in process.thread_ids(pid, proc=proc):
        found += map(int, (text(f"{proc}/{pid}/task/{tid}/children") or "").split())
    return sorted(found)


def _children_by_parent(proc: Path) -> dict[int, list[int]]:
    """The children of all processes, for kernels without lists of children."""
    found: dict[int, list[int]] = {}
    for pid in _everyone(proc):
        if stat := stat_of(pid, proc=proc):
            found.setdefault(stat.number(4), []).append(pid)
    return found


def _everyone(proc: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit())
    return []


def _orphans(pid: int, found: dict[int, None], proc: Path) -> list[int]:
    """Children of a dead child: they are in the process group that the process leads, and init has adopted them.

    Another command of the same pipeline (`python train.py | tee log`) is in that group too, but has our own parent.
    """
    own = stat_of(pid, proc=proc)
    if not own or own.number(5) != pid:
        return []
    orphans = []
    for each in _everyone(proc):
        if each in found or _group(each, proc) != pid:
            continue
        parent = stat_of(each, proc=proc).number(4)
        if parent == os.getpid() or (parent != own.number(4) and _adopts(parent, proc)):
            orphans.append(each)
    return orphans


def _group(pid: int, proc: Path) -> int:
    if proc != PROC:
        return stat_of(pid, proc=proc).number(5)
    with contextlib.suppress(OSError):
        return os.getpgid(pid)  # fifty times faster than the file, and needed for all processes
    return 0


def _adopts(pid: int, proc: Path) -> bool:
    """Whether a process is init, or a user's service manager directly below it."""
    return pid <= 1 or stat_of(pid, proc=proc).number(4) == 1


def compare_all(before: Iterable[ProcessView], after: Iterable[ProcessView]) -> tuple[ProcessView, ...]:
    """The later look at each process, with its rates; a new process has none."""
    known = {view.pid: view for view in before}
    return tuple(compare(known[view.pid], view) if view.pid in known else view for view in after)


def compare(before: ProcessView, after: ProcessView) -> ProcessView:
    """The later look, with the rates since the earlier one."""
    seconds = after.taken - before.taken
    if seconds <= 0 or not _same(before, after):
        return after
    earlier = {thread.tid: thread for thread in before.threads}
    # Thread by thread, because in a sum a thread that ended in between would count as negative.
    threads = tuple(_compare_threads(earlier.get(thread.tid), thread, seconds) for thread in after.threads)
    return msgspec.structs.replace(
        after,
        threads=threads,
        elapsed=seconds,
        busy=sum(thread.busy or 0.0 for thread in threads) if after.threads else None,
        bytes_read=_rate(before.io, after.io, 0, seconds),
        bytes_written=_rate(before.io, after.io, 1, seconds),
    )


def _same(before: ProcessView, after: ProcessView) -> bool:
    """Whether both looks are at the same process, not at a later process with the same pid."""
    return before.pid == after.pid and abs(before.started - after.started) < 1.0


def _compare_threads(before: ThreadView | None, after: ThreadView, seconds: float) -> ThreadView:
    used = after.cpu - (before.cpu if before is not None else 0.0)
    wanted = used + after.waited - (before.waited if before is not None else 0.0)
    times = after.switches - (before.switches if before is not None else 0)
    return msgspec.structs.replace(
        after, busy=max(0.0, used) / seconds, demand=max(0.0, wanted) / seconds, wakes=max(0, times) / seconds
    )


def _rate(before: tuple[int, ...], after: tuple[int, ...], index: int, seconds: float) -> float | None:
    """Bytes per second: what system calls moved (pipes, cache) or what came from the disk, the larger of both."""
    if not before or not after:
        return None
    through_calls = after[index] - before[index]
    disk = after[index + 2] - before[index + 2]
    return max(0, through_calls, disk) / seconds
