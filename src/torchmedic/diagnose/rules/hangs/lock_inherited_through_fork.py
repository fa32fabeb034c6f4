"""A forked process waits for a lock that another thread held at the time of the fork.

What: a fork copies the memory of a process but only the thread that forks. A lock that another thread held at that
moment is locked in the child forever: the thread that would release it does not exist there.

Why: threads (loggers, prefetchers, progress bars, servers) beside a DataLoader or `multiprocessing` that forks; some
libraries (OpenCV, tokenizers, database clients) have their own threads and locks.

Cure: start workers with another method (`multiprocessing_context="spawn"` or `"forkserver"`), start them before the
threads, or create a new lock in the child (`worker_init_fn`, `os.register_at_fork`).
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.stall import StallDraft, at, lock_at, main_line, stall_rule, stands, who
from torchmedic.records import Grade
from torchmedic.records.inside import InsideView, LockView, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall

_OWN = ("lock", "reentrant lock", "condition", "semaphore")  # which no other process can give back


@stall_rule("TM503", "lock-inherited-through-fork")
def check(stall: Stall) -> Draft | None:
    for process in stall.processes:
        view = stall.inside.get(process.pid)
        if view is None and (found := _of_the_parent(stall, process)) is not None:
            return found
        if view is None or not view.forked or not stands(view):
            continue
        for thread in view.threads:
            found = _of_python(stall, process, view, thread) or _of_native_code(stall, process, thread)
            if found is not None:
                return found
    return None


def _of_python(stall: Stall, process: ProcessView, view: InsideView, thread: PyThread) -> Draft | None:
    wanted = thread.waits_for
    if wanted is None or wanted.kind not in _OWN or any(_holds(each, wanted) for each in view.threads):
        return None
    alive = {each.ident for each in view.threads}
    if wanted.owner in alive or (wanted.owner is None and len(alive) > 1):
        return None
    held = _holder_in_parent(stall, process, wanted)
    grade: Grade = "proven" if held is not None or wanted.owner is not None else "likely"
    if held is None and wanted.owner is None and wanted.kind != "lock":
        return None
    draft = _draft(stall, process, grade, f"{wanted.kind} `{wanted.name}`")
    draft.at(at(thread.user_frame, "cause", f"{who(process)} waits here for `{wanted.name}`"))
    if held is not None:
        draft.at(lock_at(held, "holder", "a thread of the parent process holds it here"))
        draft.because(f"in the parent process a thread holds `{held.name}`, taken at line {held.line}")
    if wanted.owner is not None:
        draft.because(f"the lock names thread {wanted.owner:#x} as its owner, which does not exist in this process")
    else:
        draft.because("this process has one thread of Python, which waits: no thread in it can release the lock")
    return _advised(draft, stall)


def _of_native_code(stall: Stall, process: ProcessView, thread: PyThread) -> Draft | None:
    for futex in process.futexes:
        if futex.tid == (thread.tid or process.pid) and futex.owner is not None and futex.owner_lives is False:
            draft = _draft(stall, process, "proven", "a mutex of native code")
            draft.at(at(thread.user_frame, "cause", f"{who(process)} waits here, inside this call"))
            draft.because(f"the mutex names thread {futex.owner} as its owner, which does not exist in this process")
            return _advised(draft, stall)
    return None


def _of_the_parent(stall: Stall, process: ProcessView) -> Draft | None:
    """The finding from the kernel alone, without a view of Python: a thread of the parent owns the mutex."""
    for futex in process.futexes:
        if futex.owner is not None and futex.owner_lives is False and futex.owner_process == process.parent:
            draft = _draft(stall, process, "proven", "a mutex of native code")
            draft.because(f"the mutex names thread {futex.owner} as its owner, which is one of its parent's")
            return _advised(draft, stall)
    return None


def _draft(stall: Stall, process: ProcessView, grade: Grade, what: str) -> StallDraft:
    return check.draft(
        stall,
        grade,
        f"{who(process)} waits for {what}, which was locked when it was forked",
        "the fork did not copy the thread that would release the lock",
    )


def _advised(draft: StallDraft, stall: Stall) -> Draft:
    draft.at(main_line(stall))
    draft.help('start the workers without a fork: `multiprocessing_context="spawn"` (or `"forkserver"`)')
    return draft.help("or start them before the threads that use this lock")


def _holds(thread: PyThread, lock: LockView) -> bool:
    return any(held.identity == lock.identity for held in thread.holds)


def _holder_in_parent(stall: Stall, process: ProcessView, lock: LockView) -> LockView | None:
    """A fork leaves objects at their addresses, so the parent's lock has the same identity."""
    parent = stall.inside.get(process.parent)
    for thread in parent.threads if parent is not None else ():
        for held in thread.holds:
            if held.identity == lock.identity:
                return held
    return None
