"""The run waits for a child process that makes no progress.

What: a process waits in `subprocess.run`, `wait`, `communicate`, `Process.join` or in a pool, and the child makes no
progress: it uses no CPU, does not sleep for a limited time, and waits itself without a time limit.

Why: a deadlock in the child; a child that waits for a message that was never sent; a pool whose worker was killed (for
example by the kernel, for memory) together with its task, which is never repeated.

Cure: check what the child does; for a Python child the diagnosis shows its line. Set a time limit for the wait
(`subprocess.run(..., timeout=600)`, `join(600)`, `result.get(600)`); for a pool, check whether its workers die.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._counterparts import goes_on
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
        children = [stall.process(pid) for pid in _children(stall, waiter)]
        live = [child for child in children if child is not None and child.state not in "ZX"]
        if not live or not waiter.stands(stall) or waiter.ends_by_itself:
            continue
        below = [each for child in live for each in _with_descendants(stall, child)]
        if any(goes_on(stall, each) for each in below) or not all(_stands(stall, each) for each in below):
            return None
        return _told(stall, waiter, below, waiters)
    return None


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
