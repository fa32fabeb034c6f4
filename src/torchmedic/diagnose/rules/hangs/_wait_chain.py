"""Who waits for whom: from the main thread of a run that stands still to the threads and processes that keep it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.diagnose.rules.hangs.worker_stuck import waits_for_batch
from torchmedic.diagnose.words.stall import SLEEPS
from torchmedic.records.inside import LockView, PyFrame, PyThread
from torchmedic.records.process import FileWait, ProcessView, ThreadView
from torchmedic.records.stall import Stall

CHILDREN = ("wait4", "waitid")
_ANY, _BY_PID = 0, 1  # the first argument of waitid
# What another thread can give: an item, a notification, a lock that it holds.
GIVEN = frozenset(
    {"lock", "reentrant lock", "lock between processes", "semaphore", "condition", "notification", "event", "barrier",
     "future", "result of a pool", "queue get", "queue put", "queue join"}
)  # fmt: skip


class Waiter(NamedTuple):
    """A thread that waits, as the kernel shows it, and as Python does where the process could be asked."""

    process: ProcessView
    row: ThreadView
    python: PyThread | None
    by: Waiter | None = None  # who waits for it

    @property
    def files(self) -> list[FileWait]:
        return [wait for wait in self.process.files if wait.tid == self.row.tid]

    @property
    def wanted(self) -> LockView | None:
        return self.python.waits_for if self.python is not None else None

    @property
    def frame(self) -> PyFrame | None:
        return self.python.user_frame if self.python is not None else None

    @property
    def nearest_frame(self) -> PyFrame | None:
        """The user's line of this waiter, else of the waiter that waits for it."""
        return self.frame or (self.by.nearest_frame if self.by is not None else None)

    @property
    def ends_by_itself(self) -> bool:
        """Whether the wait has a time limit."""
        wanted = self.wanted
        return (
            self.row.wakes_in is not None
            or self.row.syscall in SLEEPS
            or any(wait.timed for wait in self.files)
            or (wanted is not None and wanted.timed is True)
            or any(futex.timed for futex in self.process.futexes if futex.tid == self.row.tid)
        )

    def stands(self, stall: Stall) -> bool:
        """Whether the thread has waited during the whole examination, as far as can be seen."""
        if self.row.state not in "SDI" or (self.python is not None and self.python.moved):
            return False
        return self.row.asleep is None or self.row.asleep >= min(stall.limit, stall.still)


def chain(stall: Stall, start: int | None = None) -> list[Waiter]:
    """The main thread (of the run, or of another process) first, then whom it waits for, then whom those wait for."""
    start = stall.pid if start is None else start
    found: dict[tuple[int, int], Waiter] = {}
    waiting: list[tuple[int, int, Waiter | None]] = [(start, start, None)]
    while waiting:
        pid, tid, by = waiting.pop(0)
        waiter = None if (pid, tid) in found else waiter_of(stall, pid, tid)
        if waiter is not None:
            waiter = found[pid, tid] = waiter._replace(by=by)
            waiting += [(*each, waiter) for each in _awaited(stall, waiter)]
    return list(found.values())


def waiter_of(stall: Stall, pid: int, tid: int) -> Waiter | None:
    process = stall.process(pid)
    row = process.thread(tid) if process is not None else None
    if process is None or row is None:
        return None
    view = stall.inside.get(pid)
    threads = view.threads if view is not None else ()
    python = next((each for each in threads if (each.main if tid == pid else each.tid == tid)), None)
    return Waiter(process, row, python)


def _awaited(stall: Stall, waiter: Waiter) -> Iterator[tuple[int, int]]:
    """The process and the thread of each that may keep another one waiting."""
    process, row, wanted = waiter.process, waiter.row, waiter.wanted
    if row.state in "TtZX":
        return
    yield from ((pid, pid) for pid in children_awaited(stall, waiter))
    for wait in waiter.files:
        yield from ((pid, pid) for pid in wait.peers if pid != process.pid)
    if waits_for_batch(waiter.python):
        yield from ((each.pid, each.pid) for each in stall.processes if each.is_loader_worker)
    elif wanted is not None and wanted.owner is not None:
        yield from ((process.pid, tid) for tid in _thread(stall, process, wanted.owner))
    elif wanted is not None and wanted.kind in GIVEN and waiter.frame is not None:
        view = stall.inside.get(process.pid)
        for thread in view.threads if view is not None else ():
            if thread is not waiter.python:
                yield process.pid, process.pid if thread.main else thread.tid
        if wanted.shared:
            yield from ((each.pid, each.pid) for each in stall.processes if each.pid != process.pid)
    if waiter.python is None and row.syscall == "futex":
        yield from ((process.pid, thread.tid) for thread in process.threads)


def children_awaited(stall: Stall, waiter: Waiter) -> list[int]:
    """The child processes whose end is waited for."""
    pid, row, wanted = waiter.process.pid, waiter.row, waiter.wanted
    children = [each.pid for each in stall.processes if each.parent == pid]
    if wanted is not None and wanted.process is not None:
        return [wanted.process] if wanted.process in children else []
    if row.syscall not in CHILDREN or len(row.arguments) < 2:
        return children if row.syscall in CHILDREN else []
    first, second = (each & 0xFFFFFFFF for each in row.arguments[:2])
    number = first if row.syscall == "wait4" else second if first == _BY_PID else 0
    return [number] if number in children else children


def _thread(stall: Stall, process: ProcessView, ident: int) -> list[int]:
    view = stall.inside.get(process.pid)
    return [
        process.pid if thread.main else thread.tid
        for thread in (view.threads if view is not None else ())
        if thread.ident == ident
    ]
