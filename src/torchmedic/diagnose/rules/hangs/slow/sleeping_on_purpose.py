"""The script sleeps; the run is not hung.

What: the main thread, or the thread or process that it waits for, is in `time.sleep` or waits with a time limit; or the
main thread polls again and again and sleeps in between.

Why: an intended pause, a retry after a failure, waiting for a file or a server.

Cure: none, if the pause is intended. If the kernel reports them, the diagnosis shows the remaining seconds. A loop that
polls for something that never happens does not end: give it a deadline.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import (
    demand,
    expires_soon,
    frames_in,
    helpers,
    native,
    sleep_left,
    sleeps,
    waits_for_workers,
    where,
)
from torchmedic.diagnose.rules.hangs._collectives import LAUNCHERS
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import IDLE, StallDraft, at, main_line, stall_rule, stands
from torchmedic.records.inside import PyThread
from torchmedic.records.process import ThreadView
from torchmedic.records.stall import Stall

_ALWAYS = ("True", "1", "")  # conditions that say nothing
_WAITS_FOR_LOCK = ("torch/utils/file_baton.py", "/filelock/")


@stall_rule("TM557", "sleeping-on-purpose")
def check(stall: Stall) -> Draft | None:
    main = stall.thread
    row = native(stall.view, main)
    if main is None or waits_for_workers(main) or frames_in(main, *_WAITS_FOR_LOCK) is not None:
        return None
    if main.moved and demand(row) > 2 * IDLE:
        return None  # short naps of one that works
    if sleeps(row) or _calls_sleep(main):
        return _sleeps(stall, main, row)
    left = row.wakes_in if row is not None else None
    awaited = frames_in(main, "asyncio/base_events.py") is not None  # the next thing that the script wants to do
    if left and stands(stall.inner) and (awaited or (expires_soon(stall, left) and _waits_directly(main))):
        return _waits(stall, main, left)
    for helper in helpers(stall):
        if helper.sleeps is not None:
            draft = _draft(
                stall, "likely" if helper.known else "possible", "the run waits for a thread or process that sleeps"
            )
            draft.at(at(helper.frame, "cause", f"{helper.name} sleeps here"))
            draft.at(main_line(stall, "surfaced" if helper.frame is not None else "cause"))
            draft.because(where(helper))
            return draft.rated("note")
    return None


def _sleeps(stall: Stall, main: PyThread, row: ThreadView | None) -> Draft:
    left = sleep_left(row)
    polls = main.moved
    cause = "it sleeps between two checks of a condition" if polls else "the main thread sleeps"
    if frames_in(main, *LAUNCHERS) is not None:
        cause = "a launcher waits for the processes that it has started"
    draft = _draft(stall, "likely", cause)
    loop = stall.inner.loop if polls and stall.inner is not None else None
    if loop is not None and loop.kind == "while":  # nobody knows whether it ends
        draft.message = f"the script sleeps in a loop, for {duration(stall.still)} so far"
    if loop is not None and loop.kind == "while" and loop.code not in _ALWAYS:
        draft.at(line_location("cause", loop.file, loop.line, f"goes on while this holds: `{loop.code}`"))
        draft.at(main_line(stall, "surfaced", "the main thread sleeps here"))
    else:
        draft.at(main_line(stall, "cause", "the main thread sleeps here"))
    if polls:
        draft.help("give the loop a deadline, if what it waits for may never come")
    elif left is not None:
        draft.because(f"it continues by itself in {duration(left)}")
    return draft.rated("note")


def _waits(stall: Stall, main: PyThread, left: float) -> Draft:
    draft = _draft(stall, "likely", "the main thread waits, with a time limit")
    wanted = main.waits_for
    label = f"waits for {wanted.kind} `{wanted.name}`" if wanted is not None else "waits here"
    draft.at(main_line(stall, "cause", label))
    draft.because(f"the wait ends by itself in {duration(left)} at most")
    return draft.rated("note")


def _draft(stall: Stall, grade: str, cause: str) -> StallDraft:
    message = f"not hung: the script sleeps, for {duration(stall.still)} so far"
    return check.draft(stall, "likely" if grade == "likely" else "possible", message, cause)


def _calls_sleep(main: PyThread) -> bool:
    """Whether the source line calls `sleep`, for kernels that hide the system calls of other processes."""
    frame = main.frames[0] if main.frames else None
    return frame is not None and frame.user and "sleep(" in frame.code


def _waits_directly(main: PyThread) -> bool:
    """Whether the time limit is the script's own: a library that asks in a loop sets one too, for nothing."""
    return main.waits_for is not None and frames_in(main, "/torch/", "/multiprocessing/", "subprocess.py") is None
