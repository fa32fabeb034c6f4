"""A rank calls a collective while it handles an exception, and the other ranks are still at work.

What: one rank has raised an exception. A `finally`, an `except` or the end of a `with` around its work calls a
collective (`barrier`, `all_reduce`, a save that holds one). The other ranks have no exception, and are in another call.
So the rank waits for them and they wait for the rank, and nobody gets to see the exception.

Or the rank has caught the exception and left the job, by `destroy_process_group()` or `sys.exit()` in a handler.

Why: `dist.barrier()` in a `finally`, in a handler that saves a checkpoint, or in the `__exit__` of a context manager.

Cure: mend what raised the exception. Leave collectives out of what runs after an exception: let the exception end the
process, and the launcher ends the other ranks.
"""

from __future__ import annotations

from torchmedic.detect.ranks.culprit import is_left_by_exception
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, place, ranks, show, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Difference, HandledException, Job, Leaving
from torchmedic.source.user_code import is_user_file


@rule("TM725", "collective-after-exception")
def check(job: Job) -> Draft | None:
    difference = job.difference
    state = job.of(difference.culprits[0]) if difference is not None else None
    if difference is None or state is None:
        return None
    if difference.call is None and state.left is not None and state.left.handled is not None:
        if state.fate == "raised":
            return None  # it was not caught: the rank itself tells of it
        return _left(job, difference, state.left, state.left.handled)
    if state.handles is None or not is_left_by_exception(state, difference):
        return None
    handled, call, expected = state.handles, difference.call, difference.expected
    raised = _raised(handled)
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


def _left(job: Job, difference: Difference, left: Leaving, handled: HandledException) -> Draft:
    """A rank caught an exception, and left the job while the others went on."""
    raised, expected = _raised(handled), difference.expected
    who, others = ranks(difference.culprits), ranks(difference.others)
    draft = check.draft(job, "proven")
    draft.message = f"{who} raised {handled.kind}, handled it, and left the job while {others} went on"
    draft.cause = f"{handled.kind}: {handled.text}" if handled.text else handled.kind
    draft.at(
        line_location("cause", raised.file, raised.line, f"{who} raised {handled.kind} here"),
        line_location("surfaced", left.frame.file, left.frame.line, f"{who} left the job here, by `{left.how}`"),
        at_call(expected, "origin", f"{others}: {words(expected)}" if expected is not None else ""),
    )
    show(draft, job, difference)
    draft.help(f"mend what raised {handled.kind}; the text of the exception is above")
    return draft.help("let the exception end the process, so that the launcher ends the other ranks")


def _raised(handled: HandledException) -> StackFrame:
    return next((frame for frame in handled.frames if is_user_file(frame.file)), handled.frames[0])
