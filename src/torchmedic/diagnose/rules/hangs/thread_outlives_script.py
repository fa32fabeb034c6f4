"""The script has ended, and its process waits for a thread that does not end.

What: the last statement of the script is done. Python ends a process only after all threads that are not daemons, and
one of them waits for something that nobody will send, or goes round in a loop.

Why: a thread that writes metrics or checks something now and then has no end: the mark that ends it is not put into its
queue, its flag is not set, or an exception skipped `close()`. In a job, the launcher then waits for this rank.

Cure: tell the thread to end at the end of the script, in a `finally:`, and `join()` it. Start a thread with
`daemon=True` if its work may be cut off.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._nobody_left import nobody
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, waiter_of
from torchmedic.diagnose.words.stall import IDLE, at, is_past_script, stall_rule
from torchmedic.records import Grade
from torchmedic.records.stall import Stall
from torchmedic.source.branches import loops_around


@stall_rule("TM533", "thread-outlives-script")
def check(stall: Stall) -> Draft | None:
    main, view = stall.thread, stall.inner
    if main is None or view is None or not is_past_script(main) or main.moved:
        return None
    kept = [
        waiter
        for thread in view.threads
        if not thread.main and not thread.daemon and thread.user_frame is not None
        if (waiter := waiter_of(stall, stall.pid, thread.tid)) is not None
    ]
    for waiter in kept:
        if waiter.wanted is not None and waiter.stands(stall) and not waiter.ends_by_itself:
            silence = nobody(stall, waiter)
            if silence is not None:
                draft = _told(stall, waiter, silence.grade, f"waits for {waiter.wanted.kind} `{waiter.wanted.name}`")
                return draft.because(*silence.facts).rated(silence.severity)
    if kept and all(_ticks(waiter) for waiter in kept):
        endless = next(filter(_is_endless, kept), None)
        draft = _told(stall, endless or kept[0], "likely", "sleeps" + (", in a loop without an end" if endless else ""))
        return draft.rated("error" if endless else "note")
    return None


def _ticks(waiter: Waiter) -> bool:
    """Whether a thread sleeps nearly all the time."""
    return waiter.ends_by_itself and (waiter.row.demand or 0.0) < IDLE and not waiter.files


def _is_endless(waiter: Waiter) -> bool:
    """Whether the innermost loop around the line of a thread is a `while True:` that nothing leaves."""
    frame = waiter.frame
    loops = loops_around(frame.file, frame.line) if frame is not None else []
    return bool(loops) and loops[0].header == "while True" and not loops[0].exits


def _told(stall: Stall, waiter: Waiter, grade: Grade, does: str) -> Draft:
    name = waiter.python.name if waiter.python is not None else ""
    draft = check.draft(stall, grade)
    draft.message = f"the script has ended, and its process waits for thread `{name}`"
    draft.cause = f"a process ends after all threads that are not daemons, and `{name}` {does}"
    draft.at(at(waiter.frame, "cause", f"thread `{name}` {does}"))
    draft.help("tell the thread to end at the end of the script, in a `finally:`, and `join()` it")
    return draft.help("or start it with `daemon=True`, if its work may be cut off")
