"""The verdict on a process that torchmedic did not start: hung, with the reason, or not hung.

The rules are made for a run that torchmedic has watched, and are asked only if a step takes too long. Here the step
times are unknown, so the result of the rules is checked against what can be seen from outside.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torchmedic.diagnose import engine
from torchmedic.diagnose.registry import Family
from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs import standstill_not_explained
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import BUSY, IDLE, main_line, short
from torchmedic.records import Diagnosis, Phase
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall
from torchmedic.source.user_code import relative
from torchmedic.supervise.attach.looks import asleep
from torchmedic.supervise.attach.targets import is_helper

LONG_SECONDS = 10.0  # a process that has not run for this long does not just wait for the next batch
# Rules whose finding cannot end by itself: a hang at the first look.
_CERTAIN_HANGS = frozenset(
    "thread-deadlock lock-inherited-through-fork queue-not-drained waiting-for-input stopped-process gpu-lost".split()
)
_WORK: tuple[Phase, ...] = ("forward", "backward", "optimizer")
_STATES = {"R": "runs", "T": "is stopped by a signal", "t": "is stopped by a debugger", "Z": "is dead"}
_MIN_BYTES_PER_SECOND = 10_000.0  # log lines and heartbeats are less


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`moves` means that the process makes progress, or probably does. `words` says what was seen."""

    state: Literal["hung", "moves", "unclear"]
    diagnosis: Diagnosis | None = None
    words: str = ""


def judge(stall: Stall, rules: Family[Stall]) -> Verdict:
    last = stall.box.last if stall.box is not None else None
    if last is not None and last.phase in _WORK and stall.still < stall.limit:
        return Verdict(state="moves", words=f"process {stall.pid} trains, and is in step {last.step}")
    found = engine.ask(stall, rules)
    if found is not None and found.severity != "error":
        return Verdict(state="moves", diagnosis=found)
    if found is not None and (found.name in _CERTAIN_HANGS or (stall.box is not None and stall.still >= LONG_SECONDS)):
        return Verdict(state="hung", diagnosis=_with_time(found, stall))
    words = _movement(stall)
    if words:
        return Verdict(state="moves", words=words)
    if found is not None and found.code != standstill_not_explained.check.code and _patient(stall):
        return Verdict(state="hung", diagnosis=_with_time(found, stall))
    slept = asleep(stall.processes)
    if slept is not None and slept > LONG_SECONDS:
        return Verdict(state="hung", diagnosis=_not_explained(stall, slept))
    doubt = f"{found.message}, or it is slow; " if found is not None and found.grade != "possible" else ""
    return Verdict(state="unclear", words=doubt + _doing(stall))


def _patient(stall: Stall) -> bool:
    """Whether some process has waited longer than it would for its next work item."""
    if stall.limit >= LONG_SECONDS:
        return True
    times = [view.main.asleep for view in _family(stall) if view.main is not None]
    return any(time is not None and time >= LONG_SECONDS for time in times)


def _family(stall: Stall) -> list[ProcessView]:
    return [view for view in stall.processes if view.state not in "ZX" and not is_helper(view)]


def _movement(stall: Stall) -> str:
    """A sign of progress; empty if there is none."""
    for view in _family(stall):
        inner = stall.inside.get(view.pid)
        main = inner.main if inner is not None else None
        if main is not None and main.moved and (view.demand > IDLE or view.pid == stall.pid):
            lines = sorted({line for line in main.lines if line})
            frame = main.user_frame
            where = f" at {relative(frame.file)}, lines {_range(lines)}" if frame is not None and lines else ""
            return f"the main thread of process {view.pid} moved between the looks{where}"
        written = max(view.bytes_read or 0.0, view.bytes_written or 0.0)
        if written > _MIN_BYTES_PER_SECOND:
            return f"process {view.pid} reads or writes {written / 1e6:.2g} MB a second"
    busy = [view for view in _family(stall) if (view.busy or 0.0) > IDLE]
    if busy:
        most = max(busy, key=lambda view: view.busy or 0.0)
        return f"process {most.pid} uses {most.busy:.0%} of a core{_at(stall, most)}"
    return ""


def _range(lines: list[int]) -> str:
    return f"{lines[0]}-{lines[-1]}" if len(lines) > 1 else str(lines[0])


def _at(stall: Stall, view: ProcessView) -> str:
    inner = stall.inside.get(view.pid)
    frame = inner.main.user_frame if inner is not None and inner.main is not None else None
    return f", at {short(frame)}" if frame is not None else ""


def _with_time(found: Diagnosis, stall: Stall) -> Diagnosis:
    """Add how long the main thread has not run, which a rule cannot know without a black box."""
    main = stall.view.main if stall.view is not None else None
    slept = main.asleep if main is not None else None
    if slept is None or slept < LONG_SECONDS or stall.box is not None:
        return found
    fact = f"its main thread has not run for {duration(slept)}"
    return msgspec.structs.replace(found, evidence=(fact, *found.evidence))


def _not_explained(stall: Stall, slept: float) -> Diagnosis:
    draft = Draft(
        standstill_not_explained.check.code,
        standstill_not_explained.check.name,
        "possible",
        f"process {stall.pid} makes no progress, and no rule explains it",
        f"none of its processes has run for {duration(slept)}",
        step=stall.step or None,
        rank=stall.rank,
    )
    draft.at(main_line(stall, "cause", "the main thread is here"))
    return draft.because(*_doing(stall).split("; ")).done()


def _doing(stall: Stall) -> str:
    """What each process is doing, as far as the kernel shows."""
    return "; ".join(_one(stall, view) for view in _family(stall)[:8])


def _one(stall: Stall, view: ProcessView) -> str:
    main = view.main
    if main is None:
        return f"process {view.pid} ({view.name}) is in state {view.state}"
    how = _STATES.get(main.state) or (f"waits in `{main.syscall}`" if main.syscall else f"is in state {main.state}")
    files = [wait for wait in view.files if wait.tid == view.pid and wait.target]
    what = f" on {files[0].remote or files[0].target}" if files else ""
    slept = f", has not run for {duration(main.asleep)}" if main.asleep is not None and main.asleep > 1 else ""
    rate = f", {view.busy:.0%} of a core" if (view.busy or 0) > BUSY else ""
    return f"process {view.pid} ({view.name}) {how}{what}{slept}{rate}{_at(stall, view)}"
