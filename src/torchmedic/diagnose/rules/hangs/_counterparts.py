"""What the process at the other end of a wait does: whether it can be expected to end the wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torchmedic.diagnose.rules.hangs._at_work import sleeps
from torchmedic.diagnose.rules.hangs._collectives import peer_states
from torchmedic.diagnose.rules.hangs._wait_chain import CHILDREN, Waiter, chain
from torchmedic.diagnose.rules.hangs.worker_stuck import waits_for_batch
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import BUSY, command
from torchmedic.records.inside import PyThread
from torchmedic.records.process import LISTENER, ProcessView
from torchmedic.records.stall import Stall

Doing = Literal["gone", "stopped", "waits for the run", "idle", "goes on"]
_IDLE_LIMITS = 2  # times the limit, after which an idle counterpart will do nothing
_IDLE_SECONDS_ATTACHED = 60.0  # for a run that torchmedic did not start
_WAITS = (*CHILDREN, "rt_sigsuspend", "rt_sigtimedwait", "pause")


def find(stall: Stall, pid: int) -> ProcessView | None:
    return stall.process(pid) or next((view for view in stall.outsiders if view.pid == pid), None)


def doing(stall: Stall, pid: int) -> Doing:
    """The activity of a process that the run waits for, in words."""
    view = find(stall, pid)
    if waits_for_all_ranks(stall, pid):
        return "waits for the run"
    if view is None:
        return "idle"  # not known
    if view.state in "ZX":
        return "gone"
    if view.state in "Tt":
        return "stopped"
    if stall.process(pid) is not None:
        return _doing_inside(stall, view)
    if _waits_for_run(stall, view):
        return "waits for the run"
    return "goes on" if goes_on(stall, view) else "idle"


def waits_for_all_ranks(stall: Stall, pid: int) -> bool:
    """Whether a process is another rank of the job, and all of those wait in collectives: for this rank, that is."""
    ranks = peer_states(stall, stall.pid)
    is_rank = any(peer.process.pid == pid and peer.inside is not None and peer.inside.job for peer in stall.peers)
    return is_rank and all(rank.state == "waits" for rank in ranks)


def _doing_inside(stall: Stall, view: ProcessView) -> Doing:
    """A process of the run itself does what those do that it waits for."""
    waiters = chain(stall, view.pid)
    if any(_waiter_goes_on(stall, waiter) for waiter in waiters):
        return "goes on"
    back = any(waiter.process.pid == stall.pid for waiter in waiters)
    return "waits for the run" if back else "idle"


def _waiter_goes_on(stall: Stall, waiter: Waiter) -> bool:
    """Whether a waiter goes on. If its process answers, only its own thread counts: other threads may tick."""
    if waiter.python is None:
        return goes_on(stall, waiter.process)
    if _is_idle(waiter.python):
        return False
    row = waiter.row
    return waiter.python.moved or (row.busy or 0.0) > BUSY or sleeps(row) or row.wakes_in is not None


def _is_idle(thread: PyThread) -> bool:
    """Whether a library waits in it for something to do. DataLoader does so five seconds at a time, for ever."""
    return waits_for_batch(thread) or (thread.user_frame is None and thread.waits_for is not None)


def goes_on(stall: Stall, view: ProcessView) -> bool:
    """Whether a process works, moves, or sleeps with an end."""
    inside = stall.inside.get(view.pid)
    threads = inside.threads if inside is not None else ()
    idle = {view.pid if thread.main else thread.tid for thread in threads if _is_idle(thread)}
    main = inside.main if inside is not None else None
    moved = main is not None and main.moved and not _is_idle(main)
    if (view.busy or 0.0) > BUSY or view.state == "R" or moved:
        return True
    rows = [row for row in view.threads if row.name != LISTENER and row.tid not in idle]
    return any(sleeps(row) or row.wakes_in is not None for row in rows)


def _waits_for_run(stall: Stall, view: ProcessView) -> bool:
    """Whether a process outside, the shell that started the run, say, waits for the end or the output of the run."""
    own = {each.pid for each in stall.processes} | set(stall.above)
    main = view.main
    if main is None or main.syscall in ("", "running"):
        return False
    if main.syscall in _WAITS:
        return view.pid in stall.above
    return any(wait.tid == main.tid and not own.isdisjoint(set(wait.peers) - {view.pid}) for wait in view.files)


def hopeless(stall: Stall, pids: Iterable[int]) -> bool:
    """Whether none of these will ever do what is waited for."""
    return all(doing(stall, pid) in ("gone", "stopped", "waits for the run") for pid in pids)


def patience_is_over(stall: Stall, pids: Iterable[int]) -> bool:
    """Whether those who are left have been idle for so long that nothing is to be expected of them."""
    main = stall.view.main if stall.view is not None else None
    if stall.attached:  # nobody knows for how long, but for the kernel
        over = main is not None and (main.asleep or 0.0) >= _IDLE_SECONDS_ATTACHED
    else:
        over = stall.still >= _IDLE_LIMITS * stall.limit
    return over and not any(doing(stall, pid) == "goes on" for pid in pids)


def described(stall: Stall, pid: int) -> str:
    """A process and what it does, in words."""
    view = find(stall, pid)
    what = doing(stall, pid)
    if waits_for_all_ranks(stall, pid):
        job = next(peer.inside.job for peer in stall.peers if peer.process.pid == pid and peer.inside is not None)
        return f"rank {job.rank if job is not None else '?'} of the job, which waits for all ranks in a collective"
    if view is not None and what == "goes on":
        left = next((row.wakes_in for row in view.threads if sleeps(row) and row.wakes_in is not None), None)
        what_else = f"sleeps for {duration(left)} more" if left is not None else "goes on with something else"
        return f"{command(view, pid)} {what_else}"
    words = {"gone": "is gone", "stopped": "is stopped", "idle": "does nothing"}.get(what, what)
    return f"{command(view, pid)} {words}"
