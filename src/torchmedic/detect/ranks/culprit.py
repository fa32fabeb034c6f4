"""Which rank left the common way where the logs alone cannot tell: two ranks, and no earlier step to compare with.

The source tells: a call in the body of `if rank == 0:` is made by that rank only, so the rank that made it left the
way of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from torchmedic.records import StackFrame
from torchmedic.records.ranks import BACKWARD, FORWARD, Collective, Difference, FoundBy, RankLog, RankState
from torchmedic.source.branches import Branch, branches_around, exits_before, loops_around
from torchmedic.source.line_relations import exits_before_other_side, in_one_try, is_on_both_sides

_MIN_HABIT = 2  # forwards with a backward that make one without it an exception


def named(difference: Difference, states: Sequence[RankState]) -> Difference:
    """The difference with its culprits exchanged where the source, or an exception, says so."""
    left = [state.rank for state in states if is_left_by_exception(state, difference)]
    if len(left) == 1:
        found = decided(difference, "exception", swapped=left[0] not in difference.culprits)
        return msgspec.structs.replace(found, kind="other" if found.call is not None else "stopped")
    if difference.kind == "stopped" and _went_past(difference, states):
        return msgspec.structs.replace(
            difference,
            kind="extra",
            by="branch",
            culprits=difference.others,
            others=difference.culprits,
            call=difference.expected,
            expected=None,
        )
    if difference.by == "nothing" and leaving_before_own_call(difference.call):
        difference = decided(difference, "branch", swapped=True)
    if leaving_before_own_call(difference.expected):
        return msgspec.structs.replace(difference, kind="missing")
    if difference.call is None or difference.expected is None:
        return difference
    if difference.by in ("nothing", "habit") and _may_be_left_by_rank(difference.call):
        left_out = decided(difference, "branch", swapped=True)
        return msgspec.structs.replace(left_out, kind="missing")
    if difference.by == "majority" and _have_left_loop(difference):  # with fewer batches than one of three ranks
        return decided(difference, "loop", swapped=True)
    if difference.by != "nothing":
        return difference
    own = deciding_branch(difference.call, difference.expected)
    other = deciding_branch(difference.expected, difference.call)
    if _is_alone(own) != _is_alone(other):
        return decided(difference, "branch", swapped=_is_alone(other))
    own_loops, other_loops = _loops_kept(difference)
    if own_loops < other_loops or other_loops < own_loops:  # one side has left the loop of the last common call
        return decided(difference, "loop", swapped=other_loops < own_loops)
    if (own is None) != (other is None):  # one of the two calls depends on an `if`
        return decided(difference, "test", swapped=own is None)
    return difference


def is_left_by_exception(state: RankState, difference: Difference) -> bool:
    """Whether a rank handles an exception out of a `try` or `with` that the call of the others is still in."""
    if state.rank not in (*difference.culprits, *difference.others):
        return False
    theirs = difference.expected if state.rank in difference.culprits else difference.call
    frames = (*theirs.frames, *theirs.library) if theirs is not None else ()
    return state.handles is not None and any(
        (left.file, left.function) == (frame.file, frame.function) and in_one_try(left.file, left.line, frame.line)
        for left in state.handles.frames
        for frame in frames
    )


def leaving_before_own_call(call: Collective | None) -> list[tuple[str, Branch]]:
    """The exits, by file, that lead past the line at which the ranks on the other side of a test make such a call."""
    frames = call.frames if call is not None else ()
    op = call.op if call is not None else ""
    return [(frame.file, each) for frame in frames for each in exits_before_other_side(frame.file, frame.line, op)]


def _may_be_left_by_rank(call: Collective) -> bool:
    """Whether an exit before the call is only for some ranks, and not always taken: a `return` in a handler.

    All ranks come to such a call as a rule, and whoever does not make it has taken the exit.
    """
    if not call.frames or _is_alone(deciding_branch(call, None)):
        return False
    frame = call.frames[0]
    exits = [each for each in exits_before(frame.file, frame.line) if not each.by_rank and each.exit != "raise"]
    return any(branch.by_rank for each in exits for branch in branches_around(frame.file, each.line))


def decided(difference: Difference, by: FoundBy, *, swapped: bool) -> Difference:
    """The difference with its culprits, who are the others if they are `swapped`, and how they were found."""
    if not swapped:
        return msgspec.structs.replace(difference, by=by)
    return msgspec.structs.replace(
        difference,
        by=by,
        culprits=difference.others,
        others=difference.culprits,
        call=difference.expected,
        expected=difference.call,
    )


def _loops(call: Collective | None) -> set[tuple[str, int]]:
    """The loops around the lines of a call, by file and line."""
    frames = call.frames if call is not None else ()
    return {(frame.file, loop.line) for frame in frames for loop in loops_around(frame.file, frame.line)}


def _loops_kept(difference: Difference) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """The loops of the last common call that the culprits are still in, and those that the others are still in."""
    inside = _loops(difference.before)
    return inside & _loops(difference.call), inside & _loops(difference.expected)


def _have_left_loop(difference: Difference) -> bool:
    """Whether the others have left a loop in which the culprits go on, and no `if` or exit leads to either call."""
    call, expected = difference.call, difference.expected
    if call is None or expected is None or deciding_branch(call, expected) or deciding_branch(expected, call):
        return False
    own_loops, other_loops = _loops_kept(difference)
    return other_loops < own_loops and not any(exits_before(frame.file, frame.line) for frame in expected.frames)


def _went_past(difference: Difference, states: Sequence[RankState]) -> bool:
    """Whether the ranks without the call never make it: only `if rank == 0:` leads there, and they are further on.

    A rank that has not come to its own call yet would have none either.
    """
    call = difference.expected
    if call is None or not _is_alone(deciding_branch(call, difference.before)):
        return False
    callers = [state for state in states if state.rank in difference.others]
    passed = [state for state in states if state.rank in difference.culprits]
    if callers and passed and _answers_elsewhere(call, callers[0].log, passed[0].log):
        return False
    most = max((state.updates for state in callers), default=0)
    if callers and all(state.signal == "SIGABRT" for state in callers):
        return True  # gloo ends a rank so whose partner is in a call of another size
    return bool(passed) and all(state.fate == "ended" or state.updates > most for state in passed)


def _answers_elsewhere(call: Collective, caller: RankLog | None, other: RankLog | None) -> bool:
    """Whether the other rank makes such a call at a line of its own, as in the other branch of `if rank == 0:`."""
    known = {each.path for each in caller.calls} if caller is not None else set()
    made = other.calls if other is not None else ()
    return any(each.content == call.content and each.path not in known for each in made)


def _is_alone(branch: Branch | None) -> bool:
    """Whether only some ranks come to a call: inside of `if rank == 0:`, or behind `if rank != 0: return`."""
    return branch is not None and branch.by_rank and branch.taken


def deciding_branch(call: Collective, other: Collective | None) -> Branch | None:
    """The `if` of `deciding_frame`."""
    found = deciding_frame(call, other)
    return found[1] if found is not None else None


def deciding_frame(call: Collective, other: Collective | None) -> tuple[StackFrame, Branch] | None:
    """The innermost frame of a call that depends on an `if` about the rank, else on any `if`; with that `if`.

    An `if` about the rank that leaves the function in front of the call decides too, and so does one of a library, such
    as `rank_zero_only`. An `if` about the rank with such a call on both of its sides decides nothing. Lines that the
    call of the other ranks came through as well decide nothing, and neither do those further out.
    """
    common = {place for places in other.path for place in places} if other is not None else set()
    is_own = [(frame.file, frame.line) not in common for frame in call.frames]
    start = next((at for at, each in enumerate(is_own) if each), 0)  # inside of it, a function that both call
    end = next((at for at in range(start, len(is_own)) if not is_own[at]), len(is_own))
    own = call.frames[start:end]
    found = [
        (frame, branch)
        for frame in own
        for branch in [*branches_around(frame.file, frame.line), *_early_exits(frame)]
        if not (branch.by_rank and is_on_both_sides(frame.file, frame.line, branch, call.op))
    ]
    library = (frame for frame in call.library if (frame.file, frame.line) not in common)
    within = [(frame, branch) for frame in library for branch in branches_around(frame.file, frame.line)]
    return next((pair for pair in [*found, *within] if pair[1].by_rank), found[0] if found else None)


def _early_exits(frame: StackFrame) -> list[Branch]:
    """The `if` statements about the rank after which the line of a frame is not reached."""
    exits = exits_before(frame.file, frame.line)
    return [branch for branch in exits if branch.by_rank and branch.exit in ("return", "continue")]


def forward_without_backward(log: RankLog) -> Collective | None:
    """The last forward of DistributedDataParallel that no backward followed, though as a rule one does on this rank."""
    followed: Counter[object] = Counter()
    alone: list[Collective] = []
    forward: Collective | None = None
    for call in log.calls:
        if call.op == FORWARD:
            if forward is not None:
                alone.append(forward)
            forward = call
        elif call.op == BACKWARD and forward is not None:
            followed[forward.site] += 1
            forward = None
    if forward is not None:
        alone.append(forward)
    rare = Counter(each.site for each in alone)
    usual = [each for each in alone if followed[each.site] >= max(_MIN_HABIT, 2 * rare[each.site])]
    return usual[-1] if usual else None
