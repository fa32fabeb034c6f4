"""Whether anybody is left who could end a wait: another thread, or for things that processes share, another process.

A thread that waits in the same way, without a time limit, can end nothing. Neither can one of a library that is idle:
the free thread of a pool, the monitor of a progress bar.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from torchmedic.diagnose.rules.hangs._at_work import frames_in
from torchmedic.diagnose.rules.hangs._collectives import state_of
from torchmedic.diagnose.rules.hangs._counterparts import goes_on
from torchmedic.diagnose.rules.hangs._wait_chain import GIVEN, Waiter, waiter_of
from torchmedic.diagnose.words.stall import IDLE, command, short
from torchmedic.records import Grade, Severity
from torchmedic.records.inside import PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Peer, Stall

_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch._inductor")
_TAKEN = ("lock", "reentrant lock", "lock between processes", "condition", "semaphore")
_MONITORS = ("/tqdm/_monitor.py",)  # they tick, and signal nothing to anybody
_WARNING_LIMITS = 4  # times the limit
_HANDLED = ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGHUP")


class Silence(NamedTuple):
    """The finding that nobody is left to end a wait: its grade, its severity, and where the other threads are."""

    grade: Grade
    facts: list[str]
    severity: Severity = "error"


def nobody(stall: Stall, waiter: Waiter) -> Silence | None:
    """The silence around a wait; None if somebody may still end the wait."""
    view = stall.inside.get(waiter.process.pid)
    wanted = waiter.wanted
    if view is None or view.by_signal or wanted is None:
        return None
    if view.forked and (view.threads_at_fork or 0) > 1 and wanted.kind in _TAKEN:
        return None  # its owner may have stayed behind in the parent, which is another matter
    threads = [thread for thread in view.threads if thread is not waiter.python]
    if any(_could(stall, waiter.process, thread) for thread in threads):
        return None
    facts = [f"{named(thread)} waits too, at {short(frame)}" for thread in threads if (frame := thread.user_frame)]
    shared = wanted.shared or any(_is_conduit(stall, waiter.process, thread) for thread in threads)
    others = [each for each in stall.processes if each.pid != waiter.process.pid and each.state not in "ZX"]
    others = [each for each in others if not any(word in " ".join(each.command) for word in _HELPERS)]
    ranks = [rank for peer in _at_other_end(stall, waiter) if (rank := state_of(stall, peer)) is not None]
    if shared:
        if any(rank.state != "waits" for rank in ranks):
            return None
        facts += [
            f"{each.name} has the other end, and {each.how} at {short(each.frame)}" for each in ranks if each.frame
        ]
        if any(_process_could(stall, each) for each in others):
            return None
        facts += [f"{command(each, each.pid)} waits too" for each in others]
    left = "has anything to do" if threads else "is left"
    facts = facts[:4] or ["no other thread" + (" or process" if shared else "") + f" of the run {left}"]
    if _handles_signals(waiter.process):
        facts.append("a signal handler of the script could end the wait")
        return Silence("likely", facts, "warning" if stall.still >= _WARNING_LIMITS * stall.limit else "note")
    return Silence("likely" if shared and (others or ranks) else "proven", facts)


def _at_other_end(stall: Stall, waiter: Waiter) -> list[Peer]:
    """The other ranks that have an end of the pipe on which a thread waits."""
    pids = {pid for wait in waiter.files for pid in wait.peers}
    return [peer for peer in stall.peers if peer.process.pid in pids]


def goes_on_beside(stall: Stall, pid: int, thread: PyThread | None) -> bool:
    """Whether another thread of a process than this one goes on, or may."""
    view, process = stall.inside.get(pid), stall.process(pid)
    if view is None or process is None:
        return process is not None and goes_on(stall, process)
    return any(_could(stall, process, each) for each in view.threads if each is not thread)


def timer(stall: Stall, waiter: Waiter) -> float | None:
    """Seconds until a thread of a library, such as a `threading.Timer`, acts."""
    view = stall.inside.get(waiter.process.pid)
    for thread in view.threads if view is not None else ():
        row = waiter.process.thread(thread.tid)
        ticks = thread.user_frame is None and not thread.main and frames_in(thread, *_MONITORS) is None
        if ticks and row is not None and row.wakes_in is not None and _could(stall, waiter.process, thread):
            return row.wakes_in
    return None


def _could(stall: Stall, process: ProcessView, thread: PyThread) -> bool:
    """Whether a thread may still do something for others."""
    waiter = waiter_of(stall, process.pid, process.pid if thread.main else thread.tid)
    if waiter is None:
        return thread.user_frame is not None
    if thread.user_frame is None:
        # A library's own: it passes on what other processes send, or waits for something to do.
        busy = (waiter.row.demand or waiter.row.busy or 0.0) > IDLE
        remote = thread.waits_for is None and any(wait.remote for wait in waiter.files)
        ticks = waiter.ends_by_itself and frames_in(thread, *_MONITORS) is None  # a timer calls something in the end
        return busy or remote or ticks
    if not waiter.stands(stall) or waiter.ends_by_itself:
        return True
    wanted = thread.waits_for
    if wanted is not None and wanted.kind == "thread":
        return False  # who joins another one can do no more than that one
    return wanted is None or wanted.kind not in GIVEN


def _is_conduit(stall: Stall, process: ProcessView, thread: PyThread) -> bool:
    """Whether a thread of a library waits for what another process sends: the manager of a pool of processes, say."""
    waiter = waiter_of(stall, process.pid, process.pid if thread.main else thread.tid)
    return thread.user_frame is None and waiter is not None and any(wait.peers for wait in waiter.files)


def _process_could(stall: Stall, process: ProcessView) -> bool:
    view = stall.inside.get(process.pid)
    if view is None:
        return True
    return goes_on(stall, process) or any(_could_signal(stall, process, thread) for thread in view.threads)


def _could_signal(stall: Stall, process: ProcessView, thread: PyThread) -> bool:
    """Whether a thread of another process could signal; a thread with nothing to do is in library code only."""
    if thread.user_frame is not None and not (thread.waits_for is not None and thread.waits_for.kind in GIVEN):
        idle = thread.frames and not thread.frames[0].user and thread.waits_for is not None
        return not idle
    return _could(stall, process, thread)


def _handles_signals(process: ProcessView) -> bool:
    """A handler of the user's could give the signal too."""
    numbers = [int(getattr(signal, name)) for name in _HANDLED if hasattr(signal, name)]
    return any(process.caught_signals >> (number - 1) & 1 for number in numbers)


def named(thread: PyThread) -> str:
    return "the main thread" if thread.main else f"thread `{thread.name}`" if thread.name else f"thread {thread.tid}"
