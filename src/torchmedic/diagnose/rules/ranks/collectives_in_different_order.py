"""Ranks call the same collectives in a different order.

What: one rank calls a collective first that the others call second. Calls of one group pair up by their order, so
neither call can end.

Why: two branches that make the same calls in another order, a loop over a set or over files in the order of the file
system, calls from callbacks or threads whose order is not fixed.

Cure: make the calls in one order on all ranks; sort what is looped over.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks, show, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, Difference, Job
from torchmedic.source.branches import callees_at, is_after_in_block


@rule("TM702", "collectives-in-different-order")
def check(job: Job) -> Draft | None:
    difference = job.difference
    if difference is None or difference.call is None or difference.expected is None:
        return None
    call, expected = difference.call, difference.expected
    if difference.kind not in ("other", "missing", "extra") or not _is_swapped(difference):
        return None
    who, others = ranks(difference.culprits), ranks(difference.others)
    draft = check.draft(
        job,
        "proven" if difference.by != "nothing" else "likely",
        f"{who} called {words(call)} before {words(expected)}, {others} after it",
        f"{who} and {others} make the same two calls in a different order, so that neither of them can end",
    )
    own, theirs = _parting(call, expected)
    draft.at(
        line_location("cause", own.file, own.line, f"{who}: {words(call)} comes first here"),
        line_location("origin", theirs.file, theirs.line, f"{others}: {words(expected)} comes first here"),
    )
    show(draft, job, difference)
    return draft.help("make the two calls in the same order on all ranks")


def _is_swapped(difference: Difference) -> bool:
    """Whether each side makes the call of the other next, by the source below the calls."""
    call, expected = difference.call, difference.expected
    assert call is not None
    assert expected is not None
    if not call.frames or not expected.frames:
        return False
    if (call.op, call.shapes, call.dtypes) == (expected.op, expected.shapes, expected.dtypes):
        return False
    own, theirs = _parting(call, expected)
    return _comes_after(own, theirs, expected.op) and _comes_after(theirs, own, call.op)


def _parting(call: Collective, expected: Collective) -> tuple[StackFrame, StackFrame]:
    """The outermost frames at which the ways to two calls part."""
    pairs = zip(reversed(call.frames), reversed(expected.frames), strict=False)
    return next((pair for pair in pairs if pair[0] != pair[1]), (call.frames[0], expected.frames[0]))


def _comes_after(first: StackFrame, second: StackFrame, op: str) -> bool:
    """Whether what `second` calls is called below `first` too, in the same block."""
    return is_after_in_block(first.file, first.line, {op, *callees_at(second.file, second.line)})
