"""A rank waits for a message that no rank sends, or sends one that no rank takes.

What: `send` and `recv` pair up between two ranks. One side has made a call that the other side has not made, and the
other side waits as well, is somewhere else, or has ended.

Why: both ranks receive first, the stages of a pipeline count their micro-batches differently, source and destination
are exchanged, the two sides use different tags.

Cure: let one side send first and the other receive first, or use `batch_isend_irecv`; derive the number of messages
and their tags from one value that all stages share.
"""

from __future__ import annotations

from torchmedic.detect.ranks.messages import usual_answer
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, place, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.ranks import Collective, Job
from torchmedic.source.branches import Loop, branches_around, exits_before, is_after_in_block, loops_around

_OPPOSITE = {"send": "recv", "recv": "send"}


@rule("TM705", "message-without-partner")
def check(job: Job) -> Draft | None:
    if not job.unmatched:
        return None
    rank, call = _first(job)
    assert call.peer is not None
    partner = dict(job.unmatched).get(call.peer)
    state = job.of(call.peer)
    meets = partner is not None and partner.peer == rank
    both = meets and partner is not None and partner.op == call.op
    tags = sorted((call.tag, partner.tag)) if meets and partner is not None and not both else []
    last = state.log.calls[-1] if state is not None and state.log is not None and state.log.calls else None
    there = f"rank {call.peer} {'ended' if state is not None and state.fate == 'ended' else 'last called'}"
    if state is not None and state.fate in ("raised", "died"):
        return None  # that is the cause
    cause = (
        f"ranks {rank} and {call.peer} both wait in {words(call)} for each other"
        if both
        else f"`send` and `recv` meet only if they have the same tag; here the tags are {tags[0]} and {tags[1]}"
        if tags
        else f"rank {rank} waits in {words(call, contents=True)}; {there} {_last(last)}"
    )
    draft = check.draft(job, "proven" if both or tags else "likely")
    draft.message = f"rank {rank} waits in {words(call, contents=True)}, which rank {call.peer} does not answer"
    draft.cause = cause
    draft.about(rank)
    elsewhere = not tags and (partner is None or not _answers_later(partner))
    left_out = _left_out(job, rank, call) if elsewhere else None
    if left_out is not None:
        answer, test = left_out
        draft.about(call.peer)
        draft.at(at_call(answer, "cause", f"rank {call.peer} left this out"))
        draft.because(
            f"rank {call.peer} answered this line with {words(answer)} at {place(answer)} before; "
            f"that call depends on `{test}`"
        )
    answered = _has_answered(job, rank, call)
    left = _left_loop(job, call) if left_out is None and not tags and answered else None
    if left is not None:
        file, loop = left
        draft.about(call.peer)
        draft.at(line_location("cause", file, loop.line, f"rank {call.peer} left this loop, which the others are in"))
    named = left_out is not None or left is not None
    draft.at(at_call(call, "surfaced" if named else "cause", f"rank {rank} waits here"))
    draft.at(at_call(partner or last, "origin", f"rank {call.peer} is here"))
    if not answered and not tags:
        draft.because(f"rank {call.peer} has made no `{_OPPOSITE[call.op]}` with rank {rank} so far")
    for state in job.ranks:
        log = state.log
        if log is not None and log.calls:
            draft.because(f"rank {state.rank}: {place(log.calls[-1])} {words(log.calls[-1], contents=True)}")
    return draft.help(
        "send and receive under the same condition on both ranks"
        if left_out is not None
        else "give the loop the same number of turns on all ranks"
        if left is not None
        else "pass the same `tag` on both sides"
        if tags
        else f"let rank {call.peer} call `{_OPPOSITE[call.op]}` for this message, or leave the message out"
        if not answered and not both
        else "let one of the two ranks send first and the other receive first, or use `batch_isend_irecv`"
    )


def _first(job: Job) -> tuple[int, Collective]:
    """The wait that the others follow from: who waits for a rank that itself waits for a third one only follows.

    In a ring of waits it is the one for a rank that has never answered.
    """
    waits = dict(job.unmatched)
    for rank, call in job.unmatched:
        beyond = waits.get(call.peer) if call.peer is not None else None
        if beyond is None or beyond.peer == rank:
            return rank, call
    return next((pair for pair in job.unmatched if not _has_answered(job, *pair)), job.unmatched[0])


def _has_answered(job: Job, rank: int, call: Collective) -> bool:
    state = job.of(call.peer) if call.peer is not None else None
    calls = state.log.calls if state is not None and state.log is not None else ()
    return any(each.peer == rank and each.op == _OPPOSITE[call.op] for each in calls)


def _left_out(job: Job, rank: int, call: Collective) -> tuple[Collective, str] | None:
    """The call with which the partner answered before, and the test of the `if` that it depends on."""
    assert call.peer is not None
    waiting, partner = job.of(rank), job.of(call.peer)
    if waiting is None or partner is None or waiting.log is None or partner.log is None:
        return None
    answer = usual_answer(waiting.log, partner.log, call)
    frames = answer.frames if answer is not None else ()
    for frame in (each for each in frames if each.file == frames[0].file):  # others may belong to a launcher
        tests = [branch.header for branch in branches_around(frame.file, frame.line) if not branch.only_by_rank]
        skips = [branch.header for branch in exits_before(frame.file, frame.line) if branch.exit == "continue"]
        if answer is not None and (tests or skips):
            return answer, (tests or skips)[0]
    return None


def _left_loop(job: Job, call: Collective) -> tuple[str, Loop] | None:
    """The loop around the waiting call that the partner alone has left, while two ranks or more are still in it."""
    last = {state.rank: state.log.calls[-1].site for state in job.ranks if state.log is not None and state.log.calls}
    for frame in call.frames:
        for loop in loops_around(frame.file, frame.line):
            inside = {
                rank
                for rank, site in last.items()
                if any(file == frame.file and loop.line <= line <= loop.end for file, line in site)
            }
            if len(inside) > 1 and inside == last.keys() - {call.peer}:
                return frame.file, loop
    return None


def _answers_later(partner: Collective) -> bool:
    """Whether the partner makes the other call below its own, in the same block: both did the same thing first."""
    other = {"send", "isend"} if partner.op == "recv" else {"recv", "irecv"}
    frame = partner.frames[0] if partner.frames else None
    return frame is not None and is_after_in_block(frame.file, frame.line, other)


def _last(call: Collective | None) -> str:
    return f"{words(call)} at {place(call)}" if call is not None else "nothing"
