"""Ranks call the same collectives in a different order.

What: one rank calls a collective first that the others call second. Calls of one group pair up by their order, so
neither call can end.

Why: two branches that make the same calls in another order, a loop over a set or over files in the order of the file
system, calls from callbacks or threads whose order is not fixed.

Cure: make the calls in one order on all ranks; sort what is looped over.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, ranks, show, words
from torchmedic.records import Diagnosis
from torchmedic.records.ranks import Collective, Difference, Job
from torchmedic.source.branches import is_after_in_block


@rule("TM702", "collectives-in-different-order")
def check(job: Job) -> Diagnosis | None:
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
    draft.at(
        at_call(call, "cause", f"{who}: {words(call)} comes first here"),
        at_call(expected, "origin", f"{others}: {words(expected)} comes first here"),
    )
    show(draft, job, difference)
    draft.help("make the two calls in the same order on all ranks")
    return draft.done()


def _is_swapped(difference: Difference) -> bool:
    """Whether each side makes the call of the other next: by the logs, or by the source below the calls."""
    call, expected = difference.call, difference.expected
    assert call is not None
    assert expected is not None
    if (call.op, call.shapes, call.dtypes) == (expected.op, expected.shapes, expected.dtypes):
        return False
    return _comes_after(call, expected) and _comes_after(expected, call)


def _comes_after(first: Collective, second: Collective) -> bool:
    frame = first.frames[0] if first.frames else None
    if frame is None:
        return False
    below = is_after_in_block(frame.file, frame.line, second.op)
    return below is not None and below != frame.line
