"""A rank calls a collective while it handles an exception, and the other ranks are still at work.

What: one rank has raised an exception. A `finally`, an `except` or the end of a `with` around its work calls a
collective (`barrier`, `all_reduce`, a save that holds one). The other ranks have no exception, and are in another call.
So the rank waits for them and they wait for the rank, and nobody gets to see the exception.

Why: `dist.barrier()` in a `finally`, in a handler that saves a checkpoint, or in the `__exit__` of a context manager.

Cure: mend what raised the exception. Leave collectives out of what runs after an exception: let the exception end the
process, and the launcher ends the other ranks.
"""

from __future__ import annotations

from torchmedic.detect.ranks.culprit import is_left_by_exception
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, place, ranks, show, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.ranks import Job
from torchmedic.source.user_code import is_user_file


@rule("TM725", "collective-after-exception")
def check(job: Job) -> Draft | None:
    difference = job.difference
    state = job.of(difference.culprits[0]) if difference is not None else None
    if difference is None or state is None or state.handles is None or not is_left_by_exception(state, difference):
        return None
    handled, call, expected = state.handles, difference.call, difference.expected
    raised = next((frame for frame in handled.frames if is_user_file(frame.file)), handled.frames[0])
    who, others = ranks(difference.culprits), ranks(difference.others)
    draft = check.draft(job, "proven")
    draft.message = f"{who} raised {handled.kind}, and waits for {others} while it handles this exception"
    draft.cause = f"{handled.kind}: {handled.text}" if handled.text else handled.kind
    draft.at(
        line_location("cause", raised.file, raised.line, f"{who} raised {handled.kind} here"),
        at_call(call, "surfaced", f"{who}: {words(call)}, which waits for all ranks" if call is not None else ""),
        at_call(expected, "origin", f"{others}: {words(expected)}" if expected is not None else ""),
    )
    show(draft, job, difference)
    draft.help(f"mend what raised {handled.kind}; the text of the exception is above")
    if call is not None:
        draft.help(f"leave {words(call)} at {place(call)} out of what runs after an exception")
    return draft
