"""How rules about several ranks name calls, ranks and branches, and show what each rank did."""

from __future__ import annotations

from collections.abc import Sequence

from torchmedic.detect.ranks.culprit import deciding_branch, deciding_frame
from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import listed
from torchmedic.records import Location, Role, StackFrame
from torchmedic.records.ranks import MARKS, Collective, Difference, Job, RankState
from torchmedic.source.user_code import is_library_file, relative

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
