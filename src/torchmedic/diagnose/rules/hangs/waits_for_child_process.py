"""The run waits for a child process that makes no progress.

What: a process waits in `subprocess.run`, `wait`, `communicate`, `Process.join`, in a pool or for a message of a pipe,
and the child makes no progress: it uses no CPU, does not sleep for a limited time, and waits itself without a time
limit. Or it has failed, and the message that it should have sent never comes.

Why: a deadlock in the child; a child that waits for a message that was never sent; a pool whose worker was killed (for
example by the kernel, for memory) together with its task, which is never repeated; a worker of a vector environment
that raised an exception. The end of a child does not end `recv()` while other processes have its end of the pipe open.

Cure: check what the child does; for a Python child the diagnosis shows its line. Set a time limit for the wait
(`subprocess.run(..., timeout=600)`, `join(600)`, `result.get(600)`); for a pool, check whether its workers die.
"""

from __future__ import annotations

import signal

import msgspec

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._counterparts import goes_on
from torchmedic.diagnose.rules.hangs._nobody_left import goes_on_beside
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain, children_awaited
from torchmedic.diagnose.rules.hangs.worker_stuck import waits_for_batch
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import at, command, main_line, short, stall_rule
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall


@stall_rule("TM527", "waits-for-child-process")
def check(stall: Stall) -> Draft | None:
    waiters = chain(stall)
    if waits_for_batch(stall.thread):
        return None
    for waiter in waiters:
        if waiter.python is None and waiter.row.tid != waiter.process.pid:
            continue  # some thread, of which nothing is known
        failed = _failed_sender(stall, waiter)
        if failed is not None:
            return _failure_told(stall, waiter, failed)
        children = [stall.process(pid) for pid in _children(stall, waiter)]
        live = [child for child in children if child is not None and child.state not in "ZX"]
        if not live or not waiter.stands(stall) or waiter.ends_by_itself:
            continue
        below = [each for child in live for each in _with_descendants(stall, child)]
        if any(goes_on(stall, each) for each in below) or not all(_stands(stall, each) for each in below):
            return None
        return _told(stall, waiter, below, waiters)
    return None


def _failed_sender(stall: Stall, waiter: Waiter) -> ProcessView | None:
    """A child that has failed, where all who could write to the pipes of the waiter wait for the waiter."""
    pid = waiter.process.pid
    failed = [each for each in stall.processes if each.parent == pid and _has_failed(each, waiter.process)]
    if not failed or waiter.frame is None or not waiter.stands(stall) or waiter.ends_by_itself:
        return None
    if not waiter.files or not all(wait.action in ("read", "poll") and pid in wait.peers for wait in waiter.files):
        return None
    writers = _writers(waiter)
    if not writers and any(wait.action == "poll" for wait in waiter.files):
        return None  # an event loop that waits for itself
    if goes_on_beside(stall, pid, waiter.python) or not all(_waits_back(stall, each, pid) for each in writers):
        return None
    return next((each for each in failed if each.pid in stall.raised), failed[0])


def _has_failed(child: ProcessView, parent: ProcessView) -> bool:
    """Whether a child of the same program has failed: not a command such as `git`, nor one that was told to end."""
    failed = child.state in "ZX" and child.exit_status not in (None, 0, -signal.SIGTERM)
    return failed and child.name == parent.name


def _writers(waiter: Waiter) -> list[int]:
    """Other processes that have the other end of the pipe from which the waiter reads."""
    return sorted({peer for wait in waiter.files for peer in wait.peers} - {waiter.process.pid})


def _waits_back(stall: Stall, writer: int, pid: int) -> bool:
    process = stall.process(writer)
    row = process.main if process is not None else None
    if process is None or row is None or goes_on(stall, process) or not _stands(stall, process):
        return False
    return any(wait.tid == row.tid and wait.action in ("read", "poll") and pid in wait.peers for wait in process.files)


def _failure_told(stall: Stall, waiter: Waiter, failed: ProcessView) -> Draft:
    status = failed.exit_status or 0
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    draft = check.draft(stall, "likely")
    draft.message = f"the run waits for a message, and a child process {how}"
    writers = ", ".join(map(str, _writers(waiter)))
    where = f"in process {writers}" if writers else "in the process that reads"
    draft.cause = f"child process {failed.pid} {how}; the wait does not end, as the pipe is still open {where}"
    raised = stall.raised.get(failed.pid)
    draft.at(msgspec.structs.replace(raised, label="the child raised an exception here") if raised else None)
    draft.at(at(waiter.frame, "surfaced" if raised else "cause", "waits for a message here"), main_line(stall))
    draft.because(f"who could still write waits for the run: {writers}" if writers else "")
    draft.help("catch exceptions in the child and send them, so that the parent can raise them")
    return draft.help("close the child's end of each pipe in all other processes: then `recv()` raises `EOFError`")


def _children(stall: Stall, waiter: Waiter) -> list[int]:
    """Child processes whose end or output the waiter waits for."""
    own = {each.pid for each in stall.processes if each.parent == waiter.process.pid}
    through_pipes = [pid for wait in waiter.files for pid in wait.peers if pid in own]
    wanted = waiter.wanted
    pool = sorted(own) if wanted is not None and wanted.kind == "result of a pool" else []
    return list(dict.fromkeys([*children_awaited(stall, waiter), *through_pipes, *pool]))


def _with_descendants(stall: Stall, child: ProcessView) -> list[ProcessView]:
    found = [child]
    for process in stall.processes:  # parents come before children
        if process.parent in {each.pid for each in found} and process not in found:
            found.append(process)
    return found


def _stands(stall: Stall, process: ProcessView) -> bool:
    row = process.main
    if row is None or row.state not in "SDT":
        return row is None
    return row.asleep is None or row.asleep >= min(stall.limit, stall.still)


def _told(stall: Stall, waiter: Waiter, below: list[ProcessView], waiters: list[Waiter]) -> Draft:
    child = below[0]
    pool = waiter.wanted is not None and waiter.wanted.kind == "result of a pool"
    draft = check.draft(stall, "likely")
    draft.message = (
        "no process of the pool is at work on what the run waits for"
        if pool
        else "the run waits for a child process that makes no progress"
    )
    draft.cause = f"{command(child, child.pid)} does nothing, and the wait for it has no end"
    inner = next((each for each in waiters if each.process.pid == child.pid and each.frame is not None), None)
    own = inner.frame if inner is not None and inner.frame != waiter.frame and not pool else None
    draft.at(at(own, "cause", "the child stands here"))
    draft.at(at(waiter.frame, "surfaced" if own is not None else "cause", "waits for the child here"))
    draft.at(main_line(stall, "surfaced" if waiter.frame is not None else "cause"))
    for process in below[:4]:
        draft.because(f"{command(process, process.pid)}: {_doing(stall, process)}")
    return draft.help(
        "the task of a killed worker is lost: `concurrent.futures.ProcessPoolExecutor` raises then"
        if pool
        else "give the wait a time limit (`timeout=`), so that it raises"
    )


def _doing(stall: Stall, process: ProcessView) -> str:
    row = process.main
    if row is None:
        return "has no threads"
    view = stall.inside.get(process.pid)
    frame = view.main.user_frame if view is not None and view.main is not None else None
    place = f", at {short(frame)}" if frame is not None else ""
    files = [wait.target for wait in process.files if wait.tid == row.tid and wait.target]
    on = f" on {files[0]}" if files else ""
    asleep = f", for {duration(row.asleep)}" if row.asleep is not None else ""
    return f"in the system call `{row.syscall or '?'}`{on}{place}{asleep}"
