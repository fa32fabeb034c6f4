"""Threads wait for each other's locks.

What: every thread of a group waits for a lock that another thread of the group holds, or one thread waits for a lock
that it holds itself. None of them can ever continue.

Why: two locks that are taken in a different order in two places; a `threading.Lock` that the same thread takes again (a
method that locks calls another method that locks); a thread that is joined while its lock is held.

Cure: take locks in the same order everywhere, use `threading.RLock` if a thread may take its own lock again, and do not
wait for a thread (`join`, `result`, `get`) while holding a lock that it needs.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.stall import at, lock_at, short, stall_rule
from torchmedic.records import Role
from torchmedic.records.inside import InsideView, PyThread
from torchmedic.records.stall import Stall


@stall_rule("TM502", "thread-deadlock")
def check(stall: Stall) -> Draft | None:
    for view in stall.inside.values():
        cycle = _cycle(view)
        if cycle and not any(_gives_up(stall, view.pid, thread) for thread in cycle):
            return _told(stall, cycle)
    return None


def _gives_up(stall: Stall, pid: int, thread: PyThread) -> bool:
    """Whether a thread waits for a limited time only: it will go on by itself."""
    process = stall.process(pid)
    tid = thread.tid or (pid if thread.main else 0)
    return process is not None and any(futex.tid == tid and futex.timed for futex in process.futexes)


def _cycle(view: InsideView) -> list[PyThread]:
    """Threads of which each waits for the next, and the last for the first; the main thread first if it is one."""
    threads = {thread.ident: thread for thread in view.threads}
    for start in sorted(view.threads, key=lambda thread: not thread.main):
        path: list[PyThread] = []
        thread: PyThread | None = start
        while thread is not None and thread not in path:
            if thread.moved:
                break
            path.append(thread)
            thread = threads.get(_awaited(thread, view) or 0)
        else:
            if thread is not None:
                return path[path.index(thread) :]
    return []


def _awaited(thread: PyThread, view: InsideView) -> int | None:
    """The thread that another one waits for."""
    wanted = thread.waits_for
    if wanted is None:
        return None
    if wanted.owner is not None:
        return wanted.owner
    holders = [each for each in view.threads if any(lock.identity == wanted.identity for lock in each.holds)]
    # A thread that waits for a lock at a line does not hold the lock by that line.
    return holders[0].ident if len(holders) == 1 else None


def _told(stall: Stall, cycle: list[PyThread]) -> Draft:
    first = cycle[0]
    wanted = first.waits_for
    assert wanted is not None
    if len(cycle) == 1:
        draft = check.draft(stall, "proven")
        draft.message = f"a thread waits for `{wanted.name}`, which it holds itself"
        draft.cause = f"this {wanted.kind} was taken before by the same thread, and is not released while it waits"
    else:
        draft = check.draft(stall, "proven")
        draft.message = f"deadlock: {len(cycle)} threads wait for each other's locks"
        draft.cause = f"each of {len(cycle)} threads waits for what the next one holds"
    for thread in cycle:
        lock = thread.waits_for
        frame = next((frame for frame in thread.frames if frame.user), None)
        if lock is None or frame is None:
            continue
        role: Role = "cause" if thread is first else "origin"
        draft.at(at(frame, role, f"{_name(thread)} waits for {lock.kind} `{lock.name}`"))
        for each in thread.holds:
            if any(other.waits_for is not None and other.waits_for.identity == each.identity for other in cycle):
                draft.at(lock_at(each, "holder", f"{_name(thread)} took `{each.name}` here and holds it"))
        held = ", ".join(f"`{each.name}` (line {each.line})" for each in thread.holds)
        also = f" and holds {held}" if held else ""
        draft.because(f"{_name(thread)}, at {short(frame)}, waits for `{lock.name}`{also}")
    if len(cycle) == 1:
        draft.help("use `threading.RLock()`, which the same thread may take again, or do not take it twice")
    else:
        draft.help("take these locks in the same order everywhere, or release one before waiting for the other")
    return draft


def _name(thread: PyThread) -> str:
    return "the main thread" if thread.main else f"thread `{thread.name}`" if thread.name else f"thread {thread.tid}"
