"""The run waits for keyboard input.

What: a process reads from its standard input or from a terminal: at `input()`, at the prompt of a debugger, in
`sys.stdin`. No one can answer, or the process that could write into the pipe waits for the run itself.

Why: a `breakpoint()` that was left in the code, a question ("overwrite? [y/n]") of the script or of a program that it
starts, a script that reads its data from a pipe that is never closed.

Cure: remove the breakpoint; make the answer a command-line option. Run jobs with `< /dev/null`, and start programs with
`stdin=subprocess.DEVNULL`: a question then fails immediately instead of waiting.
"""

from __future__ import annotations

from typing import NamedTuple

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._counterparts import described, hopeless, patience_is_over
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain
from torchmedic.diagnose.words.stall import at, command, main_line, stall_rule
from torchmedic.records import Grade, Severity
from torchmedic.records.inside import PyThread
from torchmedic.records.process import FileWait
from torchmedic.records.stall import Stall

_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/ipdb/", "/pudb/", "/code.py", "debugger/pdb.py")


class _Verdict(NamedTuple):
    grade: Grade
    severity: Severity


@stall_rule("TM520", "waiting-for-input")
def check(stall: Stall) -> Draft | None:
    for waiter in reversed(chain(stall)):
        wait = next((wait for wait in waiter.files if _is_input(wait)), None)
        if wait is None or not waiter.stands(stall) or (wait.timed and _debugger(waiter.python) is None):
            continue
        verdict = _verdict(stall, waiter, wait)
        if verdict is not None:
            return _told(stall, waiter, wait, verdict)
    return None


def _is_input(wait: FileWait) -> bool:
    reads = wait.action == "read" or (wait.action == "poll" and wait.wants == "read")
    return reads and (wait.descriptor == 0 or wait.target.startswith(_TERMINALS)) and not wait.remote


def _verdict(stall: Stall, waiter: Waiter, wait: FileWait) -> _Verdict | None:
    writers = [pid for pid in wait.peers if pid != waiter.process.pid]
    asks = _question(waiter)
    if wait.target.startswith(_TERMINALS) or _debugger(waiter.python) is not None:
        return _Verdict("proven", "error")
    if not wait.target.startswith(("pipe:", "socket:")) and not wait.peers:
        return None  # a file
    if wait.peers and hopeless(stall, writers):  # none at all: another user's, or outside of this container
        return _Verdict("proven", "error")
    if patience_is_over(stall, writers):
        return _Verdict("likely", "error" if asks else "warning")
    return _Verdict("likely", "note")


def _told(stall: Stall, waiter: Waiter, wait: FileWait, verdict: _Verdict) -> Draft:
    process, frame = waiter.process, waiter.frame
    asks, debugger = _question(waiter), _debugger(waiter.python)
    who = "the run" if process.pid == stall.pid else command(process, process.pid)
    for_what = "at the prompt of a debugger" if debugger is not None else f"for input{' at `input()`' if asks else ''}"
    if verdict.severity == "note":
        message = f"not hung: {who} waits for input from a process that is alive"
    else:
        message = f"{who} waits {for_what}"
    source = "a terminal" if wait.target.startswith(_TERMINALS) else f"descriptor {wait.descriptor}, {wait.target}"
    draft = check.draft(stall, verdict.grade, message, f"it reads from {source}, and receives nothing")
    draft.at(at(frame, "cause", "waits here") or main_line(stall, "cause", "waits here"))
    draft.at(main_line(stall))
    writers = [pid for pid in wait.peers if pid != process.pid]
    draft.because(*(f"at the other end: {described(stall, pid)}" for pid in writers[:3]))
    if wait.peers and not writers:
        draft.because("only the process itself has the other end of the pipe open")
    if debugger is not None:
        draft.help("remove the breakpoint, or run the script in a terminal without torchmedic to use it")
    elif process.pid != stall.pid and frame is None:
        draft.help("start the program with `stdin=subprocess.DEVNULL`, or give it the answer: `input=...`")
    else:
        draft.help("take the answer from an option or a variable; `< /dev/null` makes a question fail at once")
    return draft.rated(verdict.severity)


def _question(waiter: Waiter) -> bool:
    return waiter.frame is not None and any(word in waiter.frame.code for word in ("input(", "getpass("))


def _debugger(thread: PyThread | None) -> object:
    frames = thread.frames if thread is not None else ()
    return next((frame for frame in frames if not frame.user and any(name in frame.file for name in _DEBUGGERS)), None)
