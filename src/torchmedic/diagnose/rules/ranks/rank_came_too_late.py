"""A rank gave up waiting in a collective, and another rank was still busy with something else.

What: every collective waits for all ranks of its group, as long as the timeout of the group allows. One rank was busy
for longer, so the call of the others ended in an exception, and the job with it.

Why: one rank alone evaluates, saves, downloads or prepares data, and the timeout is shorter than that takes. Or this
rank hangs.

Cure: pass a longer `timeout` to `init_process_group`, or share the work between all ranks.
"""

from __future__ import annotations

from torchmedic.detect.ranks.late import gave_up
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, place, ranks, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import duration
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, Job, RankState
from torchmedic.source.user_code import relative


@rule("TM721", "rank-came-too-late")
def check(job: Job) -> Draft | None:
    found = gave_up(job)
    if found is None:
        return None
    waiting, late = f"rank {found.state.rank}", ranks([state.rank for state in found.late])
    busy = _busy(found.late[0], found.call)
    draft = check.draft(job, "proven" if busy is not None else "likely").about(found.late[0].rank)
    draft.message = (
        f"{late} came too late to {words(found.call)}: {waiting} gave up waiting after {duration(found.waited)}"
    )
    draft.cause = f"the timeout of the group ended the wait of {waiting} at {place(found.call)}, while {late} was busy"
    if busy is not None:
        draft.at(line_location("cause", busy.file, busy.line, f"rank {found.late[0].rank} was here at that time"))
    draft.at(at_call(found.call, "cause" if busy is None else "surfaced", f"{waiting} waited here"))
    for state in found.late[1:8]:
        where = _busy(state, found.call)
        draft.because(f"rank {state.rank} was at {relative(where.file)}:{where.line}" if where is not None else "")
    return draft.help(
        "pass a longer `timeout` to `init_process_group`, or let all ranks share the work that one rank does here"
    )


def _busy(state: RankState, call: Collective) -> StackFrame | None:
    """Where a rank was: its line in the function that makes the call, else its innermost line.

    The rank was asked after the exception. If it has come to the call since, its black box knows an earlier place.
    """
    shared = {(frame.file, frame.function) for frame in call.frames}
    if state.at and (state.at[0].file, state.at[0].line) not in call.site:
        return next((frame for frame in state.at if (frame.file, frame.function) in shared), state.at[0])
    return state.seen
