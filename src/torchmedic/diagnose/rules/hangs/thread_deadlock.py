"""Threads wait for each other, at least one of them for a lock.

What: every thread of a group waits for a lock that another thread of the group holds, or one thread waits for a lock
that it holds itself; or a thread waits for an item, for room in a queue or for a signal, and holds the lock that the
thread needs that would give it. None of them can ever continue.

Why: two locks that are taken in a different order in two places; a `threading.Lock` that the same thread takes again (a
method that locks calls another method that locks); a thread that is joined, or a loader that is read, while a lock is
held that the thread or a worker needs.

Cure: take locks in the same order everywhere, use `threading.RLock` if a thread may take its own lock again, and do not
wait for a thread (`join`, `result`, `get`) while holding a lock that it needs.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._nobody_left import named, nobody
from torchmedic.diagnose.rules.hangs._wait_chain import GIVEN, waiter_of
from torchmedic.diagnose.rules.hangs.worker_stuck import waits_for_batch
from torchmedic.diagnose.words.stall import at, lock_at, main_line, short, stall_rule
from torchmedic.records import Role
from torchmedic.records.inside import InsideView, PyThread
from torchmedic.records.stall import Stall


@stall_rule("TM502", "thread-deadlock")
def check(stall: Stall) -> Draft | None:
    for view in stall.inside.values():
        cycle = _cycle(view)
        if cycle and not any(_gives_up(stall, view.pid, thread) for thread in cycle):
            given = next((thread for thread in cycle if _owner(thread, view) is None), None)
            if given is None or _is_hopeless(stall, view.pid, given):
                return _told(stall, cycle, given)
    return _with_worker(stall)


def _with_worker(stall: Stall) -> Draft | None:
    """The main thread waits for a batch and holds the lock that the worker needs which is to deliver it."""
    main = stall.thread
    if main is None or not main.holds or not waits_for_batch(main):
        return None
    for process in stall.processes:
        view = stall.inside.get(process.pid)
        thread = view.main if view is not None and process.is_loader_worker else None
        wanted = thread.waits_for if thread is not None and not thread.moved else None
        waiter = waiter_of(stall, process.pid, process.pid)
        if thread is None or wanted is None or waiter is None or waiter.ends_by_itself or not wanted.shared:
            continue
        taken = next((each for each in main.holds if each.identity == wanted.identity), None)
        if taken is None:  # a fork leaves a lock at its address
            continue
        draft = check.draft(stall, "proven")
        draft.message = f"deadlock: the main thread waits for a batch and holds `{taken.name}`, which the worker needs"
        draft.cause = f"worker {process.pid} waits for this {wanted.kind}, and so never delivers its batch"
        draft.at(lock_at(taken, "cause", f"{named(main)} took `{taken.name}` here and holds it"))
        draft.at(at(thread.user_frame, "origin", f"the worker waits for `{wanted.name}` here"), main_line(stall))
        return draft.help(f"ask the loader for batches without holding `{taken.name}`")
    return None


def _gives_up(stall: Stall, pid: int, thread: PyThread) -> bool:
    """Whether a thread waits for a limited time only: it will go on by itself."""
    waiter = waiter_of(stall, pid, pid if thread.main else thread.tid)
    return waiter is not None and waiter.ends_by_itself


def _is_hopeless(stall: Stall, pid: int, thread: PyThread) -> bool:
    """Whether no thread outside of the cycle could give a thread what it waits for."""
    waiter = waiter_of(stall, pid, pid if thread.main else thread.tid)
    silence = nobody(stall, waiter) if waiter is not None else None
    return silence is not None and silence.grade == "proven"


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
            thread = threads.get(_owner(thread, view) or _blocked(thread, view) or 0)
        else:
            if thread is not None:
                return path[path.index(thread) :]
    return []


def _owner(thread: PyThread, view: InsideView) -> int | None:
    """The thread that holds what another one waits for."""
    wanted = thread.waits_for
    if wanted is None:
        return None
    if wanted.owner is not None:
        return wanted.owner
    holders = [each for each in view.threads if any(lock.identity == wanted.identity for lock in each.holds)]
    # A thread that waits for a lock at a line does not hold the lock by that line.
    return holders[0].ident if len(holders) == 1 else None


def _blocked(thread: PyThread, view: InsideView) -> int | None:
    """A thread that cannot give what this one waits for, because this one holds the lock that the other one needs."""
    if thread.waits_for is None or thread.waits_for.kind not in GIVEN:
        return None
    for each in view.threads:
        is_joining = each.waits_for is not None and each.waits_for.kind == "thread"
        if each is not thread and not is_joining and _owner(each, view) == thread.ident:
            return each.ident
    return None


def _told(stall: Stall, cycle: list[PyThread], given: PyThread | None) -> Draft:
    """`given` is the thread that waits for something other than a lock: what it holds must be released first."""
    first = given or cycle[0]
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
        if given is not None:
            draft.message = (
                f"deadlock: {named(given)} waits for `{wanted.name}` and holds a lock that another thread needs"
            )
            draft.cause = f"each of {len(cycle)} threads waits for the next one, and no other thread can end the wait"
    for thread in cycle:
        lock = thread.waits_for
        frame = next((frame for frame in thread.frames if frame.user), None)
        if lock is None or frame is None:
            continue
        role: Role = "cause" if thread is first else "origin"
        draft.at(at(frame, role, f"{named(thread)} waits for {lock.kind} `{lock.name}`"))
        for each in thread.holds:
            if any(other.waits_for is not None and other.waits_for.identity == each.identity for other in cycle):
                draft.at(lock_at(each, "holder", f"{named(thread)} took `{each.name}` here and holds it"))
        held = ", ".join(f"`{each.name}` (line {each.line})" for each in thread.holds)
        also = f" and holds {held}" if held else ""
        draft.because(f"{named(thread)}, at {short(frame)}, waits for `{lock.name}`{also}")
    if len(cycle) == 1:
        draft.help("use `threading.RLock()`, which the same thread may take again, or do not take it twice")
    elif given is not None:
        draft.help(f"wait for `{wanted.name}` without holding a lock that another thread needs")
    else:
        draft.help("take these locks in the same order everywhere, or release one before waiting for the other")
    return draft
