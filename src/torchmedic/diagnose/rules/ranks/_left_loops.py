"""Which loop a rank has left, or which `if` led it past a call, by the lines of the calls of all ranks."""

from __future__ import annotations

import itertools
import re

from torchmedic.detect.ranks.culprit import deciding_branch, leaving_before_own_call
from torchmedic.diagnose.rules.ranks._exchange_turns import exchanged_less_often
from torchmedic.diagnose.rules.ranks._side_by_side import is_by_rank
from torchmedic.records import StackFrame
from torchmedic.records.ranks import BACKWARD, FORWARD, Collective, Difference, Job, RankState
from torchmedic.source.branches import Loop, branches_around, exits_before, loops_around
from torchmedic.source.line_relations import in_one_try

PARTS_OF_MODEL = re.compile(r" in .*\.(named_)?(parameters|modules|children|buffers)\(")
CONSTANT_NUMBER = re.compile(r" in t?range\([\d, ]*\)$")
_OWN_START = re.compile(r" in t?range\((?!\d)[^,()]+,")
_FIXED_NUMBER = re.compile(r" in t?range\(")


def left_loop(job: Job, difference: Difference) -> tuple[str, Loop] | None:
    """The loop that the culprits have left; None if they are in it, or have only left out a part of a turn."""
    states = [state for state in map(job.of, difference.culprits) if state is not None]
    if exchanged_less_often(job, difference) is not None:
        return None
    if any(_skipped(state, difference) is not None for state in states):
        return None
    found = _left(job, difference) if _continue(job, difference) is None else None
    if found is None or have_ended(job, difference):
        return found
    if found[1].exits:
        return found
    is_constant = CONSTANT_NUMBER.search(found[1].header)  # the source gives the number of turns for all ranks
    return None if is_constant or _is_chosen_again(job, difference.call) else found


def _is_chosen_again(job: Job, call: Collective | None) -> bool:
    """Whether an `if` leads to a call that the job made before: the loop in front of it had equal turns then.

    The others may have gone past the `if`, and round the outer loop.
    """
    if call is None or deciding_branch(call, None) is None:
        return False
    logs = (state.log for state in job.ranks if state.log is not None)
    lines = [(frame.file, frame.line) for frame in call.frames[:2]]
    return any(
        lines == [(frame.file, frame.line) for frame in each.frames[:2]]
        for log in logs
        for each in log.calls
        if each.time < call.time
    )


def _skipped(state: RankState, difference: Difference) -> StackFrame | None:
    """The forward that the rank left without its backward; None if the next call is still a part of that step.

    Such a call is in the function of the forward, below it, and no backward stands between the two.
    """
    forward, call, expected = state.skipped, difference.call, difference.expected
    if forward is None or call is None or expected is None:
        return forward
    for frame in call.frames:
        if (frame.file, frame.function) == (forward.file, forward.function):
            between = [
                each.line
                for each in expected.frames
                if (each.file, each.function) == (forward.file, forward.function) and each.line < frame.line
            ]
            return forward if frame.line <= forward.line or between else None
    return forward


def _left(job: Job, difference: Difference) -> tuple[str, Loop] | None:
    """The loop that the others are in and the culprits have left, with its file; None if the culprits are still in it.

    Both the last common call and the expected one must come from the loop: the culprits took part in it. Else they must
    have passed the loop without a turn: their own call comes from below it, in the same function. A loop of a
    library (a Trainer) counts only where the user's code has none. A call that only these ranks make by their number
    tells nothing about loops.
    """
    expected, before = difference.expected, difference.before
    if expected is None or before is None or is_by_rank(difference):
        return None
    last = _last_line(job, difference)
    for frames, earlier in ((expected.frames, before.frames), (expected.library, before.library)):
        known = {(frame.file, loop.line) for frame in earlier for loop in loops_around(frame.file, frame.line)}
        found: list[tuple[str, Loop]] = []
        for frame in frames:
            for loop in loops_around(frame.file, frame.line):
                if (frame.file, loop.line) not in known and not _is_passed(difference.call, frame, loop):
                    continue
                if _is_guarded_part(frame, loop, last):
                    continue
                inside = any(file == frame.file and loop.line <= line <= loop.end for file, line in last)
                if inside and difference.call is None:
                    return None  # a turn of the loop that is not over
                if not inside and (last or have_ended(job, difference)):
                    found.append((frame.file, loop))
        if found:
            return _telling(found, job.of(difference.culprits[0]))
    return None


def _is_passed(call: Collective | None, frame: StackFrame, loop: Loop) -> bool:
    own = call.frames if call is not None else ()
    return any((each.file, each.function) == (frame.file, frame.function) and each.line > loop.end for each in own)


def _is_guarded_part(frame: StackFrame, loop: Loop, last: list[tuple[str, int]]) -> bool:
    """Whether an `if` inside a loop leads to a call, and the loop is a part of a step, which the rank goes on with.

    Then the `if` is the likelier reason why the rank did not make the call.
    """
    branches = [each for each in branches_around(frame.file, frame.line) if each.line > loop.line]
    guarded = any(each.taken and not each.by_rank and "%" not in each.test for each in branches)
    outer = [each for each in loops_around(frame.file, frame.line) if each.line < loop.line]
    goes_on = any(file == frame.file and each.line <= line <= each.end for each in outer for file, line in last)
    return guarded and not loop.exits and (goes_on or frame.function == "forward")


def _telling(loops: list[tuple[str, Loop]], state: RankState | None) -> tuple[str, Loop] | None:
    """The loop that can have fewer turns on one rank than on another, among the loops that a rank has left.

    That is one with a `break`, else one that begins at a number of its own, as after a checkpoint, else the innermost
    over something other than a fixed number, else the outermost. A loop over the parameters of a model has the same
    turns on all ranks, and one over the batches of a DistributedSampler should have.
    """
    dealt = (state.dealt.file, state.dealt.line) if state is not None and state.dealt is not None else None
    loops = [each for each in loops if each[1].exits or not PARTS_OF_MODEL.search(each[1].header)]
    broken = [each for each in loops if each[1].exits]
    uneven = [each for each in loops if not _FIXED_NUMBER.search(each[1].header)]
    uneven.sort(key=lambda each: (each[0], each[1].line) == dealt)
    begun = [each for each in loops if _OWN_START.search(each[1].header)]
    return next(iter([*broken, *begun, *uneven, *loops[-1:]]), None)


def passed_instead(job: Job, difference: Difference) -> tuple[str, Loop] | None:
    """A loop around the call of the culprits that the others may have passed without a turn, and gone on to their call.

    Who made this call before has batches for it.
    """
    call, expected = difference.call, difference.expected
    logs = [state.log for state in map(job.of, difference.others) if state is not None and state.log is not None]
    if call is None or expected is None or any(call.site == each.site for log in logs for each in log.calls):
        return None
    lines = [place for places in expected.path for place in places]
    for frame in call.frames:
        for loop in loops_around(frame.file, frame.line):
            inside = any(file == frame.file and loop.line <= line <= loop.end for file, line in lines)
            if not inside and not CONSTANT_NUMBER.search(loop.header) and not PARTS_OF_MODEL.search(loop.header):
                return frame.file, loop
    return None


def loops_left(job: Job, difference: Difference, file: str, loop: Loop) -> list[Loop]:
    """The loop that was left, and the others around the expected call in its file, which may have had fewer turns.

    The end of the process leaves all of them. A call outside of a loop leaves this one, if its turns are not counted.
    """
    frames = difference.expected.frames if difference.expected is not None else ()
    around = [each for frame in frames if frame.file == file for each in loops_around(file, frame.line)]
    others = [each for each in around if each.line != loop.line and not PARTS_OF_MODEL.search(each.header)]
    if have_ended(job, difference):
        return [loop, *others]
    last = _last_line(job, difference)
    uncounted = [each for each in others if last and not _FIXED_NUMBER.search(each.header)]
    inside = [line for each, line in last if each == file]
    return [loop, *(each for each in uncounted if not any(each.line <= line <= each.end for line in inside))]


def have_ended(job: Job, difference: Difference) -> bool:
    """Whether the culprits have come to their end, or have left the job."""
    return all(
        state is not None and (state.fate == "ended" or (state.left is not None and state.fate == "running"))
        for state in map(job.of, difference.culprits)
    )


def _last_line(job: Job, difference: Difference) -> list[tuple[str, int]]:
    """Where the first culprit is: the lines of its next call, else those of its main thread."""
    if difference.call is not None:
        return [place for places in difference.call.path for place in places]
    state = job.of(difference.culprits[0])
    if state is not None and state.fate == "running":
        return [(frame.file, frame.line) for frame in state.at]
    return []


def skipping_branch(job: Job, difference: Difference) -> tuple[str, int, str] | None:
    """The `if` after which the culprit did not reach the expected call: its file, line and text; None if there is none.

    A rank that made a forward without a backward has skipped it. Else the expected call must be missing in the logs.
    Without an `if`, it is the line of that forward: an exception that was caught has led past the backward.
    """
    expected = difference.expected
    state = job.of(difference.culprits[0])
    if expected is None or state is None or not expected.frames:
        return None
    for file, branch in leaving_before_own_call(expected):
        return file, branch.line, branch.header
    skipped = _skipped(state, difference)
    by_values = difference.kind != "missing" and skipped is None
    used = _next_turn(difference) or _continue(job, difference) if by_values else None
    if used is not None or (by_values and not _is_only_expected_chosen(job, difference)):
        return used
    common = {each for places in difference.call.path for each in places} if by_values and difference.call else set()
    for frame in itertools.takewhile(lambda frame: (frame.file, frame.line) not in common, expected.frames):
        exits, around = exits_before(frame.file, frame.line), branches_around(frame.file, frame.line)
        if skipped is not None and skipped.file == frame.file:
            exits = [branch for branch in exits if branch.line >= skipped.line]
        if by_values:  # the number of a turn is the same on all ranks
            exits, around = (
                [each for each in found if "%" not in each.test and not each.by_rank] for found in (exits, around)
            )
        if exits:
            return frame.file, exits[0].line, exits[0].header
        around = [branch for branch in around if branch.taken]
        if around:
            return frame.file, around[0].line, around[0].header
        if skipped is not None and in_one_try(frame.file, frame.line, skipped.line) and skipped.file == frame.file:
            return skipped.file, skipped.line, ""
    return None


def _next_turn(difference: Difference) -> tuple[str, int, str] | None:
    """An exit between two calls of a turn: the culprits made the first one twice, and the others made the second."""
    call, before, expected = difference.call, difference.before, difference.expected
    if call is None or before is None or expected is None or call.site != before.site:
        return None
    own = {(frame.file, frame.function): frame.line for frame in call.frames}
    for frame in expected.frames:
        begin = own.get((frame.file, frame.function), frame.line)
        for branch in exits_before(frame.file, frame.line):
            if begin < branch.line and branch.exit in ("continue", "return") and "%" not in branch.test:
                return frame.file, branch.line, branch.header
    return None


def _is_only_expected_chosen(job: Job, difference: Difference) -> bool:
    """Whether no `if` and no left loop explains the call of the culprits: the others may have chosen their call."""
    call = difference.call
    if difference.kind != "other" or call is None or deciding_branch(call, difference.expected) is not None:
        return False
    return left_loop(job, difference) is None


def _continue(job: Job, difference: Difference) -> tuple[str, int, str] | None:
    """An exit in front of the expected call, in a loop that the culprit has left: it may have used that once.

    It is a `continue` in the loop, or a `return` of a function that the loop calls. A test with `%` counts turns, which
    is the same on all ranks. An exit behind the forward was not used where each forward has its backward.
    """
    left = _left(job, difference)
    if left is None or difference.expected is None:
        return None
    file, loop = left
    state = job.of(difference.culprits[0])
    forward = _last_forward(state) if state is not None else {}
    for frame in difference.expected.frames:
        is_around = frame.file == file and loop.line < frame.line <= loop.end
        for branch in exits_before(frame.file, frame.line):
            inside = is_around and loop.line < branch.line <= loop.end
            leaves = branch.exit == "continue" if is_around else branch.exit == "return" and not branch.by_rank
            is_passed = branch.line > forward.get((frame.file, frame.function), branch.line)
            is_passed = is_passed and not branch.test.startswith("except")  # an exception may come before the forward
            if (inside or not is_around) and leaves and not is_passed and "%" not in branch.test:
                return frame.file, branch.line, branch.header
        if is_around:
            return None
    return None


def _last_forward(state: RankState) -> dict[tuple[str, str], int]:
    """The lines that led to the last forward of a rank, by file and function; empty if not each had a backward."""
    calls = state.log.calls if state.log is not None else ()
    forwards = [call for call in calls if call.op == FORWARD]
    if not forwards or len(forwards) != sum(call.op == BACKWARD for call in calls):
        return {}
    return {(frame.file, frame.function): frame.line for frame in forwards[-1].frames}
