"""A loop of the script never ends.

What: the main thread repeats a loop, uses a whole core, and makes no training step. No value that could end the loop
changes between two checks: its condition and the tests before its `break` read the same values every time. Or
the two sides of its condition only move apart, because a value has passed the one that it is compared with. The
diagnosis is an error if the branches that could change these values read nothing new either; otherwise (for example, a
search without a result) it is a warning, because the loop may still end by chance.

Why: a counter that is not incremented, a flag that is never set, a condition on a variable that the loop does not
change, a `while True` without an exit, `continue` before the line that would change the condition, `!=` between floats.

Cure: the diagnosis shows the condition, its values and the lines of the loop: change a value that the condition reads
inside the loop, or limit the number of iterations.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.stall import BUSY, at, main_line, stall_rule
from torchmedic.records.inside import InsideView, LoopView
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall

_LONG, _TIMES = 600.0, 20  # seconds, and times the limit, after which luck will not end it


@stall_rule("TM514", "endless-loop")
def check(stall: Stall) -> Draft | None:
    for process in stall.processes:
        view = stall.inside.get(process.pid)
        row = process.main
        if view is None or view.loop is None or row is None or (row.demand or 0.0) < BUSY:
            continue
        loop, thread = view.loop, view.main
        if thread is None or not thread.moved or view.batches or not (loop.endless or loop.unchanged or loop.receding):
            continue
        if _may_be_ended_by_others(view, loop, stall, process):
            continue
        if not (_is_certain(loop) or loop.receding or stall.attached) and loop.unchanged_for < stall.limit:
            continue  # luck may end it soon: it is told when it is examined again
        return _told(stall, process, view, loop)
    return None


def _is_certain(loop: LoopView) -> bool:
    return loop.endless or loop.hopeless or (bool(loop.receding) and "!=" in loop.code)


def _may_be_ended_by_others(view: InsideView, loop: LoopView, stall: Stall, process: ProcessView) -> bool:
    """A flag may be set by another thread that is at work, or a file or queue filled by another process."""
    if loop.endless:
        return False
    others = [thread for thread in view.threads if not thread.main and thread.user_frame is not None]
    return any(not _waits(thread.ident, view) for thread in others)


def _waits(ident: int, view: InsideView) -> bool:
    return any(thread.ident == ident and thread.waits_for is not None and not thread.moved for thread in view.threads)


def _told(stall: Stall, process: ProcessView, view: InsideView, loop: LoopView) -> Draft:
    thread = view.main
    assert thread is not None
    certain = _is_certain(loop)
    if loop.endless:
        why = "it is `while True` without a `break`, `return` or `raise`"
    else:
        names = loop.unchanged or loop.receding
        same = ", ".join(f"`{name}` = {value}" for name, value in zip(names, loop.values, strict=False))
        what = (
            "no value that could end the loop changes"
            if loop.unchanged
            else f"the two sides of `{loop.code}` move apart"
        )
        why = f"{what}: {same}"
    draft = check.draft(stall, "likely" if certain else "possible")
    draft.message = (
        f"the {loop.kind} loop in lines {loop.line} to {loop.end_line} does not end"
        if certain
        else f"the {loop.kind} loop in lines {loop.line} to {loop.end_line} goes on and comes no nearer to its end"
    )
    draft.cause = why
    draft.at(line_location("cause", loop.file, loop.line, "this loop does not end"))
    inner = thread.user_frame
    if inner is not None and inner.line != loop.line:
        draft.at(at(inner, "surfaced", "the thread was here at the last check"))
    if process.pid != stall.pid:
        draft.at(main_line(stall))
    lines = sorted({line for line in thread.lines if line})
    draft.because(
        f"seen at line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))} in {len(thread.lines)} looks"
    )
    busy = process.main.busy if process.main is not None else None
    draft.because(f"the thread uses {busy:.0%} of a core and makes no step" if busy is not None else "")
    draft.help(
        "compare with `<` or `>`, and with a tolerance where the values are floats"
        if loop.receding
        else "change a value that the condition reads inside the loop, or limit the number of iterations"
    )
    return draft.rated("error" if certain or stall.still > max(_LONG, _TIMES * stall.limit) else "warning")
