"""A process of the run is stopped.

What: the process, or a process that it waits for (a DataLoader worker, a child), is in state T: the kernel gives it no
CPU time until it receives SIGCONT. It has not failed, but it does not continue by itself.

Why: Ctrl-Z in its terminal, `kill -STOP`, a background job that reads from its terminal (SIGTTIN) or writes to it while
`stty tostop` is set (SIGTTOU), a scheduler that suspends jobs, or a debugger that has stopped it.

Cure: use `kill -CONT PID`, or `fg` in the shell that has stopped it. Start background jobs with `< /dev/null`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._wait_chain import chain
from torchmedic.diagnose.words.stall import at, command, main_line, stall_rule, who
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall


@stall_rule("TM524", "stopped-process")
def check(stall: Stall) -> Draft | None:
    waiter = next((waiter for waiter in chain(stall) if waiter.process.state in "Tt"), None)
    if waiter is None:
        return None
    stopped = waiter.process
    own = stopped.pid == stall.pid
    name = "the training process" if own else who(stopped)
    draft = check.draft(stall, "proven")
    draft.message = f"{name} is stopped{_by_whom(stopped)}"
    draft.cause = f"process {stopped.pid} is in state {stopped.state}, and gets no CPU until it is continued"
    if waiter.by is not None:
        draft.at(at(waiter.by.nearest_frame, "cause", f"waits for {name} here"))
        draft.at(at(waiter.frame, "origin", "it was stopped here"))
    draft.at(main_line(stall, "cause", "it was stopped here, or soon after") if own else main_line(stall))
    draft.because("" if own else f"the main process waits for {command(stopped, stopped.pid)}")
    others = [each.pid for each in stall.processes if each.state in "Tt" and each.pid != stopped.pid]
    draft.because(f"also stopped: {', '.join(map(str, others[:8]))}" if others else "")
    if stopped.state == "t":
        draft.help("let the debugger continue it, or detach it")
    else:
        draft.help(f"continue it: `kill -CONT {stopped.pid}`, or `fg` in the shell that has stopped it")
    return draft


def _by_whom(process: ProcessView) -> str:
    return " by a debugger" if process.state == "t" else ""
