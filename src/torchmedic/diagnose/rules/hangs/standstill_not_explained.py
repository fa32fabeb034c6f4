"""The run makes no progress, and no rule can say why.

What: nothing has made progress for longer than ever before in this run: no step, no phase, no Python instruction in
several checks. The diagnosis lists what each thread was doing, and what was excluded; nothing is guessed.

Why: not known. Possible are a wait for something outside this machine, a deadlock in a native library, a kernel that
does not end.

Cure: check the line that the main thread is executing. `report.json` and the `inside` folder of the run contain the
stacks of all threads and processes; attach them to a question or an issue. `pip install torchmedic[py-spy]` adds the C
frames.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._wait_chain import chain
from torchmedic.diagnose.words.stall import ends_by_itself, idle, main_line, stall_rule, stands
from torchmedic.records.stall import Stall

_MIN_SHARE_OF_CORE = 0.1  # of a core: more than a thread that wakes now and then to look


@stall_rule("TM590", "standstill-not-explained")
def check(stall: Stall) -> Draft | None:
    view = stall.view
    moves = any(inner.main is not None and inner.main.moved for inner in stall.inside.values())
    # Whoever the main thread waits for may be at work, in native code say.
    works = any(process.demand > _MIN_SHARE_OF_CORE for process in stall.processes if process.pid not in stall.mute)
    works = works or (view is not None and view.main is not None and view.main.state == "R")  # it waits for a core only
    if moves or works or not (stands(stall.inner) or stall.pid in stall.mute) or ends_by_itself(view):
        return None
    if _has_just_begun(stall):
        return None
    draft = check.draft(stall, "possible")
    draft.message = "the run makes no progress, and no rule explains why"
    draft.cause = "no Python thread made progress between several checks"
    draft.at(main_line(stall, "cause", "the main thread is here"))
    if view is not None and view.main is not None:
        thread = view.main
        call = f", in the system call `{thread.syscall}`" if thread.syscall and thread.syscall != "running" else ""
        rate = f", {view.busy:.0%} of a core" if view.busy is not None else ""
        draft.because(f"the main thread's state is {thread.state}{call}{rate}")
    excluded = ["threads that wait for each other", "a dead or stuck DataLoader worker", "a full pipe", "a file lock"]
    return draft.because("excluded: " + ", ".join(excluded) + (", a busy loop" if idle(view) else ""))


def _has_just_begun(stall: Stall) -> bool:
    """Whether a wait that holds the run up began long after the silence. A later look can say more about it."""
    rows = [waiter.row for waiter in chain(stall)]
    return any(row.asleep is not None and not row.wakes and row.asleep < min(stall.limit, stall.still) for row in rows)
