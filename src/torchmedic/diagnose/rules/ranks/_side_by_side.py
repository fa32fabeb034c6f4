"""How rules about several ranks name calls, ranks and branches, and show what each rank did."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from torchmedic.detect.ranks.culprit import deciding_branch, deciding_frame
from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import listed
from torchmedic.records import Location, Role, StackFrame
from torchmedic.records.ranks import MARKS, Collective, Difference, Job, RankState
from torchmedic.source.branches import Loop, branches_around, exits_before, loops_around
from torchmedic.source.user_code import is_library_file, relative

PARTS_OF_MODEL = re.compile(r" in .*\.(named_)?(parameters|modules|children|buffers)\(")
_CONSTANT_NUMBER = re.compile(r" in t?range\([\d, ]*\)$")
_FIXED_NUMBER = re.compile(r" in t?range\(")
_MAX_SHOWN = 8  # ranks that are shown one by one
_REASONS = {
    "majority": "most ranks went the other way",
    "habit": "all ranks made the other call at this point before",
    "insertion": "no other rank makes this call anywhere",
    "end": "the other ranks went on",
    "branch": "the call depends on the rank",
    "test": "only this one of the two calls depends on an `if`",
    "loop": "the other ranks are still in the loop of the last common call",
    "exception": "it handles an exception",
    "nothing": "",
}


def ranks(numbers: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0 and 2`, `ranks 0 to 6`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 3 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    if len(numbers) > _MAX_SHOWN:
        return f"{len(numbers)} ranks"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def words(call: Collective, *, contents: bool = False) -> str:
    """A call in words, with the shapes and dtypes of its tensors if asked for."""
    text = f"`{call.op}`"
    if contents and call.shapes:
        kinds = call.dtypes or ("",) * len(call.shapes)
        text += " of " + listed([f"{dtype}{list(shape)}" for dtype, shape in zip(kinds, call.shapes, strict=False)], 3)
    if contents and call.peer is not None:
        text += f" {'to' if call.op == 'send' else 'from'} rank {call.peer}"
        text += f" with tag {call.tag}" if call.tag else ""
    return text


def innermost(call: Collective | None) -> StackFrame | None:
    """The user's innermost line of a call; without one, that of a library."""
    return next(iter((*call.frames, *call.library)), None) if call is not None else None


def place(call: Collective | None) -> str:
    frame = innermost(call)
    return f"{relative(frame.file)}:{frame.line}" if frame is not None else "an unknown line"


def at_call(call: Collective | None, role: Role, label: str) -> Location | None:
    """The innermost line of a call."""
    frame = innermost(call)
    return line_location(role, frame.file, frame.line, label) if frame is not None else None


def at_branch(call: Collective, other: Collective | None, role: Role, label: str) -> Location | None:
    """The user's line of a call that depends on a branch: the call itself, or what calls its function.

    Where an `if` leaves the function in front of the call, the line is that of the `if`.
    """
    chosen = deciding_frame(call, other)
    if not call.frames or chosen is None or is_library_file(chosen[0].file):
        return at_call(call, role, label)
    frame = chosen[0]
    exit_line = chosen[1].line if chosen[1].exit is not None else None
    return line_location(role, frame.file, exit_line or frame.line, label)


def show(draft: Draft, job: Job, difference: Difference) -> None:
    """Add what each rank did, side by side, and how the culprit was found."""
    draft.because(*(_line(job, state, difference) for state in job.ranks[:_MAX_SHOWN]))
    if len(job.ranks) > _MAX_SHOWN:
        draft.because(f"and {len(job.ranks) - _MAX_SHOWN} more ranks")
    if difference.before is not None:
        draft.because(
            f"the last call that all ranks made alike: {words(difference.before)} at {place(difference.before)}"
        )
    for call in (difference.call, difference.expected):
        if call is not None and not call.frames and call.library:
            way = ", ".join(f"`{frame.function}`" for frame in call.library[:_MAX_SHOWN])
            draft.because(f"no line of the script led to {words(call)}, but these functions, innermost first: {way}")
    reason = _REASONS[difference.by]
    draft.because(f"{ranks(difference.culprits)} left the common way: {reason}" if reason else "")


def _line(job: Job, state: RankState, difference: Difference) -> str:
    log = state.log
    if log is None:
        return f"rank {state.rank}: its calls are not known"
    call = difference.call if state.rank in difference.culprits else difference.expected
    if state.rank not in (*difference.culprits, *difference.others):  # no member of the group, or a third way
        call = next((each for each in reversed(log.calls) if each.op not in MARKS), None)
    fate = {
        "ended": ", then ended",
        "raised": ", then failed",
        "died": f", then died{f' of {state.signal}' if state.signal else ''}",
    }.get(state.fate, "")
    if call is None:
        last = log.calls[-1] if log.calls else None
        told = f"no further call after {words(last)} at {place(last)}" if last is not None else "no call"
        return f"rank {state.rank}: {told}{fate}"
    return f"rank {state.rank}: {place(call)} {words(call, contents=True)}{fate}"


def is_by_rank(difference: Difference) -> bool:
    """Whether the call of the culprits depends on an `if` about the rank."""
    if difference.call is None:
        return False
    branch = deciding_branch(difference.call, difference.expected)
    return branch is not None and branch.by_rank


def left_loop(job: Job, difference: Difference) -> tuple[str, Loop] | None:
    """The loop that the culprits have left; None if they are in it, or have only left out a part of a turn."""
    states = [state for state in map(job.of, difference.culprits) if state is not None]
    if any(_skipped(state, difference) is not None for state in states):
        return None
    found = _left(job, difference) if _continue(job, difference) is None else None
    if found is None or have_ended(job, difference):
        return found
    if found[1].exits:
        return found
    is_constant = _CONSTANT_NUMBER.search(found[1].header)  # the source gives the number of turns for all ranks
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

    Both the last common call and the expected one must come from the loop: the culprits took part in it. A loop of a
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
                if (frame.file, loop.line) not in known:
                    continue
                if _is_guarded_part(frame, loop, last):
                    continue
                inside = any(file == frame.file and loop.line <= line <= loop.end for file, line in last)
                if inside and difference.call is None:
                    return None  # a turn of the loop that is not over
                if not inside and (last or have_ended(job, difference)):
                    found.append((frame.file, loop))
        if found:
            return _telling(found)
    return None


def _is_guarded_part(frame: StackFrame, loop: Loop, last: list[tuple[str, int]]) -> bool:
    """Whether an `if` inside a loop leads to a call, and the loop is a part of a step, which the rank goes on with.

    Then the `if` is the likelier reason why the rank did not make the call.
    """
    branches = [each for each in branches_around(frame.file, frame.line) if each.line > loop.line]
    guarded = any(each.taken and not each.by_rank and "%" not in each.test for each in branches)
    outer = [each for each in loops_around(frame.file, frame.line) if each.line < loop.line]
    goes_on = any(file == frame.file and each.line <= line <= each.end for each in outer for file, line in last)
    return guarded and not loop.exits and (goes_on or frame.function == "forward")


def _telling(loops: list[tuple[str, Loop]]) -> tuple[str, Loop] | None:
    """The loop that can have fewer turns on one rank than on another, among the loops that a rank has left.

    That is one with a `break`, else the innermost over something other than a fixed number, else the outermost. A loop
    over the parameters of a model has the same turns on all ranks.
    """
    loops = [each for each in loops if each[1].exits or not PARTS_OF_MODEL.search(each[1].header)]
    broken = [each for each in loops if each[1].exits]
    uneven = [each for each in loops if not _FIXED_NUMBER.search(each[1].header)]
    return next(iter([*broken, *uneven, *loops[-1:]]), None)


def have_ended(job: Job, difference: Difference) -> bool:
    """Whether the processes of the culprits have come to their end."""
    return all(state is not None and state.fate == "ended" for state in map(job.of, difference.culprits))


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
    """
    expected = difference.expected
    state = job.of(difference.culprits[0])
    if expected is None or state is None or not expected.frames:
        return None
    skipped = _skipped(state, difference)
    by_values = difference.kind != "missing" and skipped is None
    if by_values and not _is_only_expected_chosen(job, difference):
        return _continue(job, difference)
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
    return None


def _is_only_expected_chosen(job: Job, difference: Difference) -> bool:
    """Whether the call of the culprits depends on nothing, and no loop was left: the others may have chosen theirs."""
    call = difference.call
    if difference.kind != "other" or call is None or deciding_branch(call, difference.expected) is not None:
        return False
    return left_loop(job, difference) is None


def _continue(job: Job, difference: Difference) -> tuple[str, int, str] | None:
    """A `continue` in front of the expected call, in a loop that the culprit has left: it may have used that once.

    A test with `%` counts turns, which is the same on all ranks.
    """
    left = _left(job, difference)
    if left is None or difference.expected is None:
        return None
    file, loop = left
    for frame in difference.expected.frames:
        for branch in exits_before(frame.file, frame.line):
            inside = frame.file == file and loop.line < branch.line <= loop.end
            if inside and branch.exit == "continue" and "%" not in branch.test:
                return file, branch.line, branch.header
    return None
