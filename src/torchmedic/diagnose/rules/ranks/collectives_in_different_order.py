"""Ranks call the same collectives in a different order.

What: one rank calls a collective first that the others call second. Calls of one group pair up by their order, so
neither call can end.

Why: two branches that make the same calls in another order, a loop over a set or over files in the order of the file
system, calls from callbacks or threads whose order is not fixed.

Cure: make the calls in one order on all ranks; sort what is looped over.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import place, ranks, show, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records import Role, StackFrame
from torchmedic.records.ranks import MARKS, Collective, Difference, Job
from torchmedic.source.branches import branches_around, callees_at, loops_around
from torchmedic.source.line_relations import follows_in_block, in_comprehension, is_after_in_block


@rule("TM702", "collectives-in-different-order")
def check(job: Job) -> Draft | None:
    difference = _across_groups(job) or job.difference
    if difference is None or difference.call is None or difference.expected is None:
        return None
    call, expected = difference.call, difference.expected
    if difference.kind not in ("other", "missing", "extra") or not _is_swapped(difference):
        return None
    who, others = ranks(difference.culprits), ranks(difference.others)
    draft = check.draft(job, "proven" if difference.by != "nothing" and _shared_loop(difference) is None else "likely")
    first, second = (
        f"{words(each)}{f' at {place(each)}' if call.op == expected.op else ''}" for each in (call, expected)
    )
    draft.message = f"{who} called {first} before {second}, {others} after it"
    draft.cause = f"{who} and {others} make the same two calls in a different order, so that neither of them can end"
    shared = _shared_loop(difference)
    if shared is not None:
        draft.at(line_location("cause", shared.file, shared.line, "this loop calls other functions first on each rank"))
    own, theirs = _parting(call, expected)
    branch = _branch(own, theirs) if shared is None and difference.by == "nothing" else None
    if branch is not None:
        draft.at(line_location("cause", own.file, branch, "this decides which call is first"))
    role: Role = "cause" if shared is None and branch is None else "origin"
    draft.at(line_location(role, own.file, own.line, f"{who}: {words(call)} first"))
    draft.at(line_location("origin", theirs.file, theirs.line, f"{others}: {words(expected)} first"))
    show(draft, job, difference)
    return draft.help("make the two calls in the same order on all ranks")


def _across_groups(job: Job) -> Difference | None:
    """The difference of a rank that has not come to a call, with the call of another group that this rank waits in."""
    found = job.difference
    state = job.of(found.culprits[0]) if found is not None and found.kind == "stopped" else None
    calls = [each for each in state.log.calls if each.op not in MARKS] if state is not None and state.log else []
    if found is None or not calls or calls[-1].group == found.group:
        return None
    return replace(found, kind="other", call=calls[-1], by="nothing")


def _is_swapped(difference: Difference) -> bool:
    """Whether each side makes the call of the other next, by the source below the calls."""
    call, expected = difference.call, difference.expected
    assert call is not None
    assert expected is not None
    if not call.frames or not expected.frames:
        return False
    if (call.op, call.group, call.shapes, call.dtypes) == (
        expected.op,
        expected.group,
        expected.shapes,
        expected.dtypes,
    ):
        return False
    if _shared_loop(difference) is not None:
        return True
    own, theirs = _parting(call, expected)
    if own.file == theirs.file and follows_in_block(own.file, own.line, theirs.line):
        return False  # who is at the later line has passed the other
    return _comes_after(own, theirs, expected.op) and _comes_after(theirs, own, call.op)


def _parting(call: Collective, expected: Collective) -> tuple[StackFrame, StackFrame]:
    """The outermost frames at which the ways to two calls part. The log keeps the innermost frames of each."""
    shared = next((frame for frame in call.frames if frame in expected.frames), None)
    if shared is None:
        return call.frames[-1], expected.frames[-1]
    own, theirs = call.frames.index(shared), expected.frames.index(shared)
    return call.frames[max(0, own - 1)], expected.frames[max(0, theirs - 1)]


def _branch(own: StackFrame, theirs: StackFrame) -> int | None:
    """The line of the `if` that leads to two lines, one in each of its branches."""
    sides = {each.line: each.taken for each in branches_around(own.file, own.line)} if own.file == theirs.file else {}
    around = branches_around(theirs.file, theirs.line)
    return next((each.line for each in around if each.line in sides and sides[each.line] != each.taken), None)


def _shared_loop(difference: Difference) -> StackFrame | None:
    """The line of a loop that called one function on some ranks and another on the others: a list of callbacks."""
    call, expected = difference.call, difference.expected
    if difference.kind != "other" or call is None or expected is None:
        return None
    shared = next((frame for frame in call.frames if frame in expected.frames), None)
    own, theirs = _parting(call, expected)
    if shared is None or own.function == theirs.function or shared in (own, theirs):
        return None
    return shared if loops_around(shared.file, shared.line) or in_comprehension(shared.file, shared.line) else None


def _comes_after(first: StackFrame, second: StackFrame, op: str) -> bool:
    """Whether what `second` calls is called below `first` too, in the same block."""
    return is_after_in_block(first.file, first.line, {op, *callees_at(second.file, second.line)})
