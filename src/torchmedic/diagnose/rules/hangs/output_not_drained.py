"""No process reads the output of the run.

What: a process is blocked in a write to a pipe (most often its output). A pipe holds 64 kB; when it is full, the writer
waits until the process at the other end reads. That process does not read: it waits for the run itself, is stopped, or
is idle.

Why: `subprocess.Popen(..., stdout=PIPE)` and then `wait()`, which never reads; a wrapper, notebook or scheduler that
started the run with a pipe and does not read it; `train.py | head` and similar pipelines with a blocked reader; a
terminal that was paused with Ctrl-S.

Cure: use `communicate()` or `subprocess.run(..., capture_output=True)`, which read while they wait; send unneeded
output to a file or to `DEVNULL`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._counterparts import described, find, hopeless, patience_is_over
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain
from torchmedic.diagnose.words.stall import at, command, main_line, stall_rule
from torchmedic.records import Grade, Severity
from torchmedic.records.process import FileWait
from torchmedic.records.stall import Stall

_STREAMS = {1: "stdout", 2: "stderr"}


@stall_rule("TM521", "output-not-drained")
def check(stall: Stall) -> Draft | None:
    for waiter in reversed(chain(stall)):
        wait = next((wait for wait in waiter.files if writes_into_pipe(wait)), None)
        if wait is None or wait.timed or not waiter.stands(stall):
            continue
        readers = readers_of(stall, waiter, wait)
        if wait.peers and hopeless(stall, readers):  # none at all: another user's, or outside of this container
            return _told(stall, waiter, wait, readers, "proven", "error")
        if patience_is_over(stall, readers):
            severity: Severity = "error" if wait.target.startswith("/dev/") else "warning"
            return _told(stall, waiter, wait, readers, "likely", severity)
        return _told(stall, waiter, wait, readers, "likely", "note")
    return None


def writes_into_pipe(wait: FileWait) -> bool:
    """Whether the wait is for a write that ends only if another process reads."""
    writes = wait.action == "write" or (wait.action == "poll" and wait.wants == "write")
    return writes and (wait.target.startswith(("pipe:", "socket:", "/dev/pts/", "/dev/tty")) or bool(wait.peers))


def readers_of(stall: Stall, waiter: Waiter, wait: FileWait) -> list[int]:
    """The processes that should read. Where torchmedic reads and passes the output on, the processes behind it."""
    readers: list[int] = []
    for pid in wait.peers:
        if pid == waiter.process.pid:
            continue
        view = find(stall, pid)
        passed_on = [
            peer
            for each in (view.files if view is not None and pid in stall.above else ())
            if writes_into_pipe(each)
            for peer in each.peers
            if peer != pid
        ]
        readers += passed_on or [pid]
    return readers


def _told(stall: Stall, waiter: Waiter, wait: FileWait, readers: list[int], grade: Grade, severity: Severity) -> Draft:
    process, own = waiter.process, waiter.process.pid == stall.pid
    what = _STREAMS.get(wait.descriptor, f"descriptor {wait.descriptor}")
    who = "the run" if own else command(process, process.pid)
    terminal = wait.target.startswith("/dev/")
    if severity == "note":
        message = f"not hung: {who} waits for a slow reader of its {what}"
    elif terminal:
        message = f"the terminal does not accept what {who} writes to {what}"
    else:
        message = f"no process reads what {who} writes to {what}, and the pipe is full"
    draft = check.draft(stall, grade, message, f"it is blocked in a write to {wait.target} until a process reads")
    frame = waiter.frame
    label = "writes here, and waits" if own or frame is not None else "waits for it here, and does not read"
    draft.at(at(frame, "cause", label) or main_line(stall, "cause", label))
    draft.at(main_line(stall))
    draft.because(*(f"at the other end: {described(stall, pid)}" for pid in readers[:3]))
    if wait.peers and not readers:
        draft.because("only the process itself has the other end of the pipe open")
    if terminal:
        draft.help("press Ctrl-Q in that terminal: Ctrl-S has paused it")
    elif own:
        draft.help("make the process at the other end read, or send the output to a file")
    else:
        draft.help("read while waiting: `communicate()` or `subprocess.run(..., capture_output=True)`")
    return draft.rated(severity)
