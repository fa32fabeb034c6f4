"""Some ranks call a collective that the others do not call.

What: a call that all ranks of a group must make (`all_reduce`, `barrier`, `broadcast`, the backward of
DistributedDataParallel) was made by some ranks only, or one rank left it out. Calls of one group pair up by their
order, so the job fails or stands still at this call or at a later one that is not to blame.

Why: a branch that only some ranks take: `if rank == 0:` around a save or a metric that holds a collective, a `continue`
before `backward()` on the rank whose batch was bad, a group that only its members make.

Cure: let all ranks make the call, and do only the work that is meant for one rank inside the branch. Where the data
decides, let all ranks decide alike: `all_reduce` a flag first, or multiply the loss by zero in place of skipping it.
"""

from __future__ import annotations

from torchmedic.detect.ranks.culprit import deciding_frame
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._exchange_turns import Alone, exchanged_less_often
from torchmedic.diagnose.rules.ranks._left_loops import (
    have_ended,
    left_loop,
    skipping_branch,
)
from torchmedic.diagnose.rules.ranks._side_by_side import at_branch, at_call, innermost, place, ranks, show, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.ranks import BACKWARD, MARKS, Collective, Difference, Job, Leaving
from torchmedic.source.branches import branches_around, exits_before, process_ends_between
from torchmedic.source.user_code import relative

_WORLD = "0"  # the group of all ranks


@rule("TM701", "collective-on-some-ranks")
def check(job: Job) -> Draft | None:
    difference = job.difference
    if difference is None or difference.kind == "content":
        return None
    alone = exchanged_less_often(job, difference)
    if alone is not None:
        return _in_other_turns(job, difference, alone)
    skipped = skipping_branch(job, difference)
    if skipped is not None:
        return _skipped(job, difference, *skipped)
    if difference.call is None and difference.expected is not None:
        draft = _went_past(job, difference, difference.expected)
        if draft is None and have_ended(job, difference) and left_loop(job, difference) is None:
            draft = _ended(job, difference, difference.expected)
        return draft
    if difference.call is None or innermost(difference.call) is None or left_loop(job, difference) is not None:
        return None
    call, expected = difference.call, difference.expected
    who, others = ranks(difference.culprits), ranks(difference.others)
    apart = _in_another_group(job, difference, call)
    if apart:
        return _other_group(job, difference, call, apart)
    certain = difference.by not in ("nothing", "end", "loop", "test")
    instead = f", while {others} went on to {words(expected)} at {place(expected)}" if expected else ""
    draft = check.draft(job, "proven" if certain else "likely")
    draft.message = f"{who} called {words(call)}, which {others} did not call"
    draft.cause = f"{words(call)} at {place(call)} must be called by all ranks of its group{instead}"
    draft.at(at_branch(call, expected or difference.before, "cause", f"only {who} came here"))
    draft.at(at_call(call, "origin", f"{who}: {words(call)}"))
    draft.at(at_call(expected, "surfaced", f"{others}: {words(expected)}" if expected is not None else ""))
    show(draft, job, difference)
    chosen = deciding_frame(call, expected or difference.before)
    if chosen is not None:
        draft.because(f"the call depends on `{chosen[1].header}`, {relative(chosen[0].file)}:{chosen[1].line}")
    return draft.help("let every rank make this call, and keep only the work of one rank inside the branch")


def _in_another_group(job: Job, difference: Difference, call: Collective) -> list[int]:
    """The ranks whose last call is this one at the same line, but in another group, which waits for others."""
    states = [state for rank in difference.others if (state := job.of(rank)) is not None and state.log is not None]
    last = {state.rank: state.log.calls[-1] for state in states if state.log is not None and state.log.calls}
    return [
        rank
        for rank, each in last.items()
        if (each.op, each.site) == (call.op, call.site) and call.site and each.group != call.group
    ]


def _other_group(job: Job, difference: Difference, call: Collective, apart: list[int]) -> Draft:
    who, others = ranks(difference.culprits), ranks(apart)
    own = "the group of all ranks" if call.group == _WORLD else "a group"
    theirs = "another group" if call.group == _WORLD else "another group or all ranks"
    draft = check.draft(job, "proven")
    draft.message = f"{who} called {words(call)} with {own}, and {others} called it with {theirs}"
    draft.cause = f"calls of different groups do not meet: each waits for the members of its own group at {place(call)}"
    draft.at(at_call(call, "cause", f"{who}: {own}; {others}: {theirs}"))
    show(draft, job, difference)
    return draft.help("pass the same group on all ranks that are to exchange here")


def _skipped(job: Job, difference: Difference, file: str, line: int, test: str) -> Draft:
    expected = difference.expected
    assert expected is not None
    who = ranks(difference.culprits)
    what = "backward" if expected.native else words(expected)
    draft = check.draft(job, "likely")
    draft.message = f"{who} left out {what}, which the other ranks called"
    draft.cause = f"{who} took the branch `{test}`, after which {what} at {place(expected)} is not reached"
    if any(
        (each.line, each.taken) == (line, True) for at in expected.frames for each in branches_around(at.file, at.line)
    ):
        draft.cause = f"{who} did not take the branch `{test}`, which leads to {what} at {place(expected)}"
    if not test:
        draft.cause = f"{who} began a step that ended without {what}: an exception was caught on the way there"
    draft.at(
        line_location("cause", file, line, f"{who} left out the call {'here' if test else 'after this line'}"),
        at_call(expected, "surfaced", f"{ranks(difference.others)}: {what}, which waits for all ranks"),
        at_call(difference.call, "origin", f"{who}: {words(difference.call)}" if difference.call is not None else ""),
    )
    show(draft, job, difference)
    state = job.of(difference.culprits[0])
    if difference.kind != "missing" and (state is None or state.skipped is None):
        draft.because("a loop with fewer turns on this rank would look the same")
    if not test:
        return draft.help("let the exception end the job, or let all ranks leave out the step: all_reduce a flag")
    is_backward = expected.native or expected.op == BACKWARD
    other = ", or multiply the loss by zero" if is_backward else ""
    return draft.help(f"let all ranks decide alike: all_reduce a flag before the branch{other}")


def _in_other_turns(job: Job, difference: Difference, alone: Alone) -> Draft:
    """The ranks accumulate the gradients of different numbers of micro-batches before they exchange them."""
    who, others = ranks(difference.culprits), ranks(difference.others)
    draft = check.draft(job, "likely")
    draft.message = f"{others} exchanged gradients in a backward that {who} did not exchange"
    draft.cause = (
        f"{who} usually called backward {alone.culprits} times for an update, {others} {alone.others} times, and only "
        "the last one exchanges gradients"
    )
    draft.at(
        line_location("cause", alone.file, alone.line, "decides on each rank in which turns gradients are exchanged"),
        at_call(difference.expected, "surfaced", f"{others}: backward, which waits for all ranks"),
    )
    show(draft, job, difference)
    return draft.help("let all ranks exchange gradients in the same turns: after the same number of micro-batches")


def _ended(job: Job, difference: Difference, expected: Collective) -> Draft:
    """A rank came to its end, without an exception, before a call that the others wait in."""
    who, others = ranks(difference.culprits), ranks(difference.others)
    draft = check.draft(job, "likely")
    draft.message = f"{who} ended without {words(expected)}, which {others} called"
    draft.cause = f"{words(expected)} at {place(expected)} waits for all ranks, and the process of {who} is over"
    left = _leaving(job, difference)
    ends = [(file, line) for file, first, last in _ways(difference, expected) for line in _ends(file, first, last)]
    if left is not None:
        ends = [(left.frame.file, left.frame.line)]
        draft.cause = f"{words(expected)} at {place(expected)} waits for all ranks, and {who} left by `{left.how}`"
    for file, line in ends[:1]:
        draft.at(
            line_location(
                "cause", file, line, f"{who} left the job here" if len(ends) == 1 else "a process may end here"
            )
        )
    draft.at(at_call(expected, "surfaced" if ends else "cause", f"{others}: {words(expected)}, which waits for {who}"))
    show(draft, job, difference)
    return draft.help("let no rank end by itself: all ranks end together, or all go on")


def _ways(difference: Difference, expected: Collective) -> list[tuple[str, int, int]]:
    """By file, the lines between the last common call and the call of the others, where one function made both.

    Without a common call, these are the lines from the beginning of a function to the call of the others.
    """
    if difference.before is None:
        return [(frame.file, 0, frame.line) for frame in expected.frames]
    before = difference.before.frames
    return [
        (frame.file, earlier.line, frame.line)
        for frame in expected.frames
        for earlier in before
        if (earlier.file, earlier.function) == (frame.file, frame.function) and earlier.line < frame.line
    ]


def _ends(file: str, first: int, last: int) -> list[int]:
    returns = [each.line for each in exits_before(file, last) if each.exit == "return" and each.line > first]
    return (process_ends_between(file, first, last) if first else []) or returns


def _leaving(job: Job, difference: Difference) -> Leaving | None:
    """Where a rank left the job: by `sys.exit()`, or under an `if`. All ranks leave at the end of a script."""
    state = job.of(difference.culprits[0])
    left = state.left if state is not None else None
    if left is None or not (left.how == "sys.exit()" or branches_around(left.frame.file, left.frame.line)):
        return None
    return left


def _went_past(job: Job, difference: Difference, expected: Collective) -> Draft | None:
    """A member of a group came to a later call of another group, without the call that the others wait in."""
    state = job.of(difference.culprits[0])
    last = state.log.calls[-1] if state is not None and state.log is not None and state.log.calls else None
    if last is None or last.op in MARKS or difference.group in (last.group, "0") or last.thread != expected.thread:
        return None
    who, others = ranks(difference.culprits), ranks(difference.others)
    members = ranks(sorted((*difference.culprits, *difference.others)))
    draft = check.draft(job, "likely")
    draft.message = f"{who} left out {words(expected)} in the group of {members}, which {others} called"
    draft.cause = (
        f"{words(expected)} must be called by {members} with their own group; {who} went on to {words(last)} at "
        f"{place(last)} without it. A call with a group that a rank is no member of returns at once"
    )
    draft.at(
        at_call(expected, "cause", f"{others}: {words(expected)}, which waits for {who}"),
        at_call(last, "surfaced", f"{who}: {words(last)}"),
    )
    show(draft, job, difference)
    return draft.help(f"compare the group that {who} passes here with the groups that it is a member of")
