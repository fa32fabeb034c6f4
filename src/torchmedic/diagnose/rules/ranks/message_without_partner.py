"""A rank waits for a message that no rank sends, or sends one that no rank takes.

What: `send` and `recv` pair up between two ranks. One side has made a call that the other side has not made, and the
other side waits as well, is somewhere else, or has ended.

Why: both ranks receive first, or all ranks of a ring send first, the stages of a pipeline count their micro-batches
differently, source and destination are exchanged, the two sides use different tags.

Cure: let one side send first and the other receive first, or use `batch_isend_irecv`; derive the number of messages
and their tags from one value that all stages share.
"""

from __future__ import annotations

from torchmedic.detect.ranks.messages import leads_to, ring_of, unequal_turns, usual_answer
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, place, ranks, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.ranks import Collective, Job
from torchmedic.source.branches import Loop, branches_around, exits_before, loops_around
from torchmedic.source.line_relations import is_after_in_block

_OPPOSITE = {"send": "recv", "recv": "send"}


@rule("TM705", "message-without-partner")
def check(job: Job) -> Draft | None:
    if not job.unmatched:
        return None
    rank, call = _first(job)
    assert call.peer is not None
    if not 0 <= call.peer < job.world_size:
        return _without_such_rank(job, rank, call)
    crossed = _crossed(job)
    if crossed is not None:
        return crossed
    uneven = _uneven(job, rank, call.peer) or _uneven(job, call.peer, rank)
    if uneven is not None:
        return uneven
    partner = dict(job.unmatched).get(call.peer)
    state = job.of(call.peer)
    meets = partner is not None and partner.peer == rank
    ring = ring_of(dict(job.unmatched), rank)
    both = len(ring) > 2 or (meets and partner is not None and partner.op == call.op)
    tags = sorted((call.tag, partner.tag)) if meets and partner is not None and not both else []
    last = state.log.calls[-1] if state is not None and state.log is not None and state.log.calls else None
    has_ended = state is not None and (state.fate == "ended" or state.left is not None)
    there = f"rank {call.peer} {'has left the job, after' if has_ended else 'last called'}"
    if state is not None and state.fate in ("raised", "died"):
        return None  # that is the cause
    cause = (
        f"{ranks(sorted(ring))} all wait in {words(call)}, each for the next: none comes to its `{_OPPOSITE[call.op]}`"
        if len(ring) > 2
        else f"ranks {rank} and {call.peer} both wait in {words(call)} for each other"
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
    own_loop = _loop_of_more_turns(job, rank, call) if elsewhere else None
    left_out = _left_out(job, rank, call) if elsewhere and own_loop is None else None
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
    by_exit = _left_by_exit(job, rank, call) if left_out is None and left is None and elsewhere else None
    if left is not None:
        file, loop = left
        draft.about(call.peer)
        draft.at(line_location("cause", file, loop.line, f"rank {call.peer} left this loop, which the others are in"))
    if by_exit is not None:
        draft.about(call.peer)
        draft.at(line_location("cause", *by_exit, f"rank {call.peer} left its loop of messages here"))
    if own_loop is not None and left is None and by_exit is None:
        label = f"rank {rank} is in this loop, and rank {call.peer} has left its own"
        draft.at(line_location("cause", own_loop[0], own_loop[1].line, label))
    named = left_out is not None or left is not None or by_exit is not None or own_loop is not None
    draft.at(at_call(call, "surfaced" if named else "cause", f"rank {rank} waits here"))
    where = f"the last call of rank {call.peer}" if has_ended else f"rank {call.peer} is here"
    draft.at(at_call(partner or last, "origin", where))
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
        if left is not None or (own_loop is not None and by_exit is None)
        else f"let rank {call.peer} tell the other rank that it stops, or send to the end of the loop"
        if by_exit is not None
        else "pass the same `tag` on both sides"
        if tags
        else f"let rank {call.peer} call `{_OPPOSITE[call.op]}` for this message, or leave the message out"
        if not answered and not both
        else "let one of the ranks send first and the next one receive first, or use `batch_isend_irecv`"
    )


def _without_such_rank(job: Job, rank: int, call: Collective) -> Draft:
    draft = check.draft(job, "proven").about(rank)
    draft.message = f"rank {rank} waits in {words(call, contents=True)}, and the job has no rank {call.peer}"
    draft.cause = f"the ranks of the job are 0 to {job.world_size - 1}"
    draft.at(at_call(call, "cause", f"rank {rank} waits here"))
    return draft.help("take the number of the other rank modulo the world size, or leave out the message at the end")


def _crossed(job: Job) -> Draft | None:
    """A message to a rank that takes none from its sender, but waits for one of a third rank, which waits in turn."""
    waits = dict(job.unmatched)
    for sender, sent in job.unmatched:
        target = sent.peer if sent.op == "send" else None
        taken = waits.get(target) if target is not None else None
        state = job.of(target) if target is not None else None
        if taken is None or taken.op != "recv" or state is None or state.log is None or state.log.dropped:
            continue
        if any(each.peer in (None, sender) and each.op.startswith("recv") for each in state.log.calls):
            continue
        if (sent.shapes, sent.dtypes) != (taken.shapes, taken.dtypes) or not leads_to(waits, taken.peer, sender):
            continue
        draft = check.draft(job, "likely").about(sender)
        what = words(sent, contents=True)
        draft.message = f"rank {sender} waits in {what}, which waits for rank {taken.peer}"
        draft.cause = (
            f"the `dst` of one call or the `src` of the other is wrong: rank {target} has never called `recv` for rank "
            f"{sender}, and rank {taken.peer} waits as well"
        )
        draft.at(at_call(sent, "cause", f"rank {sender} sends to rank {target} here"))
        draft.at(at_call(taken, "origin", f"rank {target} waits for rank {taken.peer} here"))
        for rank, call in job.unmatched:
            draft.because(f"rank {rank}: {place(call)} {words(call, contents=True)}")
        return draft.help("let both sides of a message compute the other rank from one rule")
    return None


def _uneven(job: Job, rank: int, peer: int) -> Draft | None:
    """Two ranks wait for each other after a loop of messages that has more turns on `rank` than on `peer`.

    Where the loop of `peer` had as many turns as that of `rank` before, `peer` is the one that left its loop too early.
    """
    wait, other = dict(job.unmatched).get(rank), dict(job.unmatched).get(peer)
    if wait is None or other is None or (wait.op, wait.peer, other.peer) != (other.op, peer, rank):
        return None
    logs = [state.log for state in map(job.of, (rank, peer)) if state is not None and state.log is not None]
    turns = unequal_turns(logs[0], logs[1], wait)
    own, theirs = _loop_around(wait), _loop_around(turns.answer) if turns is not None else None
    if turns is None or own is None or theirs is None or _is_in(other, *theirs):
        return None
    number, answer = turns.number, turns.answer.op
    is_early = turns.usual > number
    draft = check.draft(job, "proven").about(peer if is_early else rank)
    draft.message = (
        f"rank {peer} left a loop after {number} turns, and rank {rank} waits in `{wait.op}` for one more"
        if is_early
        else f"rank {rank} waits in `{wait.op}` for message {number + 1} of a loop, and rank {peer} made {number}"
    )
    draft.cause = f"the loops around `{wait.op}` and `{answer}` have different numbers of turns"
    file, loop = theirs if is_early else own
    label = f"rank {peer}: {number} turns, and {turns.usual} before" if is_early else ""
    draft.at(line_location("cause", file, loop.line, label or f"rank {rank}: {number + 1} turns or more"))
    draft.at(at_call(wait, "surfaced", f"rank {rank} waits here"))
    draft.at(at_call(turns.answer, "origin", f"rank {peer} made `{answer}` {number} times, then went on"))
    draft.because(f"rank {rank}: {place(wait)} {words(wait, contents=True)}")
    draft.because(f"rank {peer}: {place(other)} {words(other, contents=True)}")
    return draft.help("give both loops the same number of turns, derived from one value")


def _loop_around(call: Collective) -> tuple[str, Loop] | None:
    """The innermost loop around a call, in its function or in one that calls it; with its file."""
    loops = ((frame.file, loop) for frame in call.frames for loop in loops_around(frame.file, frame.line))
    return next(loops, None)


def _is_in(call: Collective, file: str, loop: Loop) -> bool:
    return any(each == file and loop.line <= line <= loop.end for each, line in call.site)


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


def _usual(job: Job, rank: int, call: Collective) -> tuple[Collective | None, Collective | None]:
    """The call with which the partner answered before, and its last one."""
    waiting, partner = (state.log if state is not None else None for state in (job.of(rank), job.of(call.peer or 0)))
    if waiting is None or partner is None or not partner.calls:
        return None, None
    return usual_answer(waiting, partner, call), partner.calls[-1]


def _left_out(job: Job, rank: int, call: Collective) -> tuple[Collective, str] | None:
    """The call with which the partner answered before, and the test of the `if` that it depends on."""
    answer, _ = _usual(job, rank, call)
    frames = answer.frames if answer is not None else ()
    for frame in (each for each in frames if each.file == frames[0].file):  # others may belong to a launcher
        tests = [branch.header for branch in branches_around(frame.file, frame.line) if not branch.only_by_rank]
        skips = [branch.header for branch in exits_before(frame.file, frame.line) if branch.exit == "continue"]
        if answer is not None and (tests or skips):
            return answer, (tests or skips)[0]
    return None


def _loop_of_more_turns(job: Job, rank: int, call: Collective) -> tuple[str, Loop] | None:
    """The loop of a rank that waits for one more message of another, which has left the loop of its earlier answers.

    A loop over the other ranks has one message for each of them, and has come round.
    """
    answer, last = _usual(job, rank, call)
    theirs = _loop_around(answer) if answer is not None else None
    loops = [(frame.file, loop) for frame in call.frames for loop in loops_around(frame.file, frame.line)]
    if theirs is None or last is None or any(_is_in(last, *each) for each in (theirs, *loops)):
        return None
    state = job.of(rank)
    earlier = state.log.calls[:-1] if state is not None and state.log is not None else ()
    before = next((each for each in reversed(earlier) if each.site == call.site), call)
    return next(iter(loops[1:] if before.peer != call.peer else loops), None)


def _left_by_exit(job: Job, rank: int, call: Collective) -> tuple[str, int] | None:
    """The only `if` that leaves the loop in which the partner answered before, if the partner is outside of it now.

    A loop without such an `if` is left at its own line, if a third rank is still in it.
    """
    answer, _ = _usual(job, rank, call)
    partner = job.of(call.peer or 0)
    if partner is None:
        return None
    for frame in answer.frames if answer is not None else ():
        for loop in loops_around(frame.file, frame.line):
            inside = {
                state.rank
                for state in job.ranks
                if state.log is not None
                for file, line in (state.log.calls[-1].site if state.log.calls else ())
                if file == frame.file and loop.line <= line <= loop.end
            }
            has_left = partner.fate == "ended" or partner.left is not None
            if (call.peer not in inside or has_left) and len(loop.exits) == 1:
                return frame.file, loop.exits[0].line
            if (has_left or (call.peer not in inside and inside - {rank})) and not loop.exits:
                return frame.file, loop.line
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
