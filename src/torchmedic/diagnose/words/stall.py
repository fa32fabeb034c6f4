"""What every rule about a run without progress says: since when, where it stands, and what other threads do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from torchmedic.diagnose.rule import Check, Draft, Rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import at_moment, duration, listed
from torchmedic.records import Diagnosis, Grade, Location, Role, Severity
from torchmedic.records.inside import InsideView, LockView, PyFrame, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall
from torchmedic.source.user_code import relative, source_line

BUSY = 0.5  # of one core: whoever wants more is at work on something
IDLE = 0.05  # of one core: whoever wants less is idle
_ENDING = (("_shutdown", "threading.py"), ("_exit_function", os.path.join("multiprocessing", "util.py")))
SLEEPS = ("nanosleep", "clock_nanosleep")  # calls of who wants to wait


class StallDraft(Draft):
    """A draft that knows which process stands still."""

    def __init__(self, rule: Rule[Stall], stall: Stall, grade: Grade, message: str, cause: str) -> None:
        super().__init__(rule.code, rule.name, grade, message, cause, step=stall.step, rank=stall.rank)
        self._stall = stall
        self.because(since(stall))

    def done(self, *, step: int | None = None, severity: Severity | None = None) -> Diagnosis:
        """Add what is known of the other threads and processes, and end."""
        self.because(*_company(self._stall))
        return super().done(step=step, severity=severity)


class StallRule(Rule[Stall], frozen=True):
    """A rule about a run that makes no progress."""

    def draft(self, stall: Stall, grade: Grade, message: str = "", cause: str = "") -> StallDraft:
        return StallDraft(self, stall, grade, message, cause)


def stall_rule(code: str, name: str) -> Callable[[Check[Stall]], StallRule]:
    """Make a rule of a check; its drafts know which process stands still."""
    return lambda check: StallRule(code, name, check)


def since(stall: Stall) -> str:
    """For how long there has been no progress, and how long that took before."""
    if stall.attached and stall.box is None:
        return ""
    begun = stall.box is not None and bool(stall.box.moments)
    where = at_moment(stall.step, stall.phase) if begun else "before the first step"
    before = f"; the longest earlier silence was {duration(stall.usual)}" if stall.usual is not None else ""
    return f"no progress for {duration(stall.still)}, {where}{before}"


def at(frame: PyFrame | None, role: Role, label: str) -> Location | None:
    """A place in the source for a frame, with the expression under way where it is known."""
    if frame is None or not frame.line:
        return None
    text = source_line(frame.file, frame.line)
    if frame.end_column <= frame.column or frame.end_column > len(text.rstrip()) + 1:
        return line_location(role, frame.file, frame.line, label)
    return Location(
        role=role,
        file=relative(frame.file),
        line=frame.line,
        column=frame.column,
        end_column=frame.end_column,
        code=text.strip(),
        indent=len(text) - len(text.lstrip()),
        label=label,
    )


def lock_at(lock: LockView, role: Role, label: str) -> Location | None:
    return line_location(role, lock.file, lock.line, label) if lock.file and lock.line else None


def main_line(stall: Stall, role: Role = "surfaced", label: str = "the main process waits here") -> Location | None:
    """The user's line that the main thread of the stalled process is in; the black box knows it if nobody else does."""
    thread = stall.thread
    if thread is not None and thread.user_frame is not None:
        return at(thread.user_frame, role, label)
    if thread is not None and is_past_script(thread):
        return None
    moment = stall.box.last if stall.box is not None else None
    return line_location(role, moment.file, moment.line, label) if moment is not None and moment.file else None


def is_past_script(main: PyThread) -> bool:
    """Whether a main thread has left the script, and ends its process."""
    return any(main.calls(*place) is not None for place in _ENDING)


def short(frame: PyFrame) -> str:
    return f"{relative(frame.file)}:{frame.line}"


def stands(view: InsideView | None) -> bool:
    """Whether the main thread of a process was seen at one and the same instruction in all looks."""
    thread = view.main if view is not None else None
    return thread is not None and len(thread.samples) > 1 and not thread.moved


def idle(process: ProcessView | None) -> bool:
    return process is not None and process.busy is not None and process.demand < IDLE


def busy(process: ProcessView | None) -> bool:
    return process is not None and process.demand > BUSY


def ends_by_itself(process: ProcessView | None) -> bool:
    """Whether the main thread sleeps or waits for a limited time only."""
    thread = process.main if process is not None else None
    if process is None or thread is None:
        return False
    return thread.wakes_in is not None or any(wait.tid == thread.tid and wait.timed for wait in process.futexes)


def descendants(stall: Stall) -> list[ProcessView]:
    return [process for process in stall.processes if process.pid != stall.pid]


def who(process: ProcessView) -> str:
    if process.is_loader_worker:
        return f"DataLoader worker {process.pid}"
    return f"process {process.pid}"


def command(process: ProcessView | None, pid: int) -> str:
    """A process in the words of its command line."""
    words = " ".join(process.command) if process is not None else ""
    return f"process {pid}" + (f" (`{words[:80]}`)" if words else "")


def _company(stall: Stall) -> Iterator[str]:
    """Where the other threads and processes are."""
    inner = stall.inner
    others = [thread for thread in inner.threads if not thread.main] if inner is not None else []
    for thread in others[:4]:
        frame = thread.user_frame or (thread.frames[0] if thread.frames else None)
        if frame is not None:
            yield f"thread {_named(thread)} is at {short(frame)} in {frame.function}"
    workers = [process for process in stall.processes if process.is_loader_worker]
    if workers:
        states = listed([f"{process.pid} {_doing(process, stall.inside.get(process.pid))}" for process in workers], 4)
        yield f"DataLoader workers: {states}"


def _named(thread: PyThread) -> str:
    return f"`{thread.name}`" if thread.name else f"{thread.tid or hex(thread.ident)}"


def _doing(process: ProcessView, view: InsideView | None) -> str:
    thread = view.main if view is not None else None
    frame = thread.user_frame if thread is not None else None
    if frame is not None:
        return f"at {short(frame)}"
    return {"Z": "has ended", "T": "is stopped", "D": "is in the kernel", "R": "is running"}.get(process.state, "waits")
