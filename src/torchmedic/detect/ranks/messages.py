"""What one rank sends to another: `send` and `recv` pair up by their number, the parts of `all_to_all` by rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from torchmedic.records.ranks import MARKS, Collective, Difference, RankLog
from torchmedic.source.branches import callees_at

_ASYNCHRONOUS = {"isend", "irecv", "batch_isend_irecv"}


def unmatched(logs: Iterable[RankLog]) -> list[tuple[int, Collective]]:
    """The last `send` or `recv` of each rank that has no partner on the other rank, by rank.

    A rank may wait for any of its latest asynchronous calls, and for none before its last other call.
    """
    logs = list(logs)
    sent: Counter[tuple[int, int, int]] = Counter()  # by source, destination and tag
    received: Counter[tuple[int, int, int]] = Counter()
    for log in logs:
        for call in log.calls:
            if call.peer is not None and call.op == "send":
                sent[(log.rank, call.peer, call.tag)] += 1
            elif call.peer is not None and call.op == "recv":
                received[(call.peer, log.rank, call.tag)] += 1
    found = []
    for log in logs:
        latest = [call for call in reversed(log.calls) if call.op not in MARKS]
        for call in latest:
            if call.peer is None or call.op not in ("send", "recv"):
                break
            if call is not latest[0] and not _ASYNCHRONOUS & callees_at(call.frames[0].file, call.frames[0].line):
                break
            pair = (log.rank, call.peer, call.tag) if call.op == "send" else (call.peer, log.rank, call.tag)
            own, partner = (sent, received) if call.op == "send" else (received, sent)
            if own[pair] > partner[pair]:
                found.append((log.rank, call))
                break
    return found


def usual_answer(waiting: RankLog, partner: RankLog, call: Collective) -> Collective | None:
    """The call of the partner that answered the same line of the waiting rank the last time; None if none did."""
    if waiting.dropped or partner.dropped or call.op not in ("send", "recv"):
        return None  # messages are paired by their number
    own = [each for each in waiting.calls if each.op == call.op and each.peer == partner.rank]
    other = "recv" if call.op == "send" else "send"
    answers = [each for each in partner.calls if each.op == other and each.peer == waiting.rank]
    earlier = [answer for each, answer in zip(own[:-1], answers, strict=False) if each.site == call.site]
    return earlier[-1] if earlier else None


def leads_to(waits: dict[int, Collective], rank: int | None, wanted: int) -> bool:
    """Whether a rank waits for another one in the end: for a third one that waits for it, and so on."""
    for _ in waits:
        if rank == wanted or rank not in waits:
            break
        rank = waits[rank].peer
    return rank == wanted


def ring_of(waits: dict[int, Collective], rank: int) -> list[int]:
    """The ranks that wait for each other at one line, each for the next, and for no rank outside; empty if none do."""
    found = [rank]
    while (peer := waits[found[-1]].peer) in waits and peer not in found:
        found.append(peer)
    is_closed = peer == rank and len({(waits[each].op, waits[each].site) for each in found}) == 1
    return found if is_closed else []


class Turns(NamedTuple):
    """A row of messages that one rank made once more than the other, which answered `number` of them by `answer`.

    `usual` is how many the other rank answered in each of its earlier rows; 0 if there is none, or they differ.
    """

    answer: Collective
    number: int
    usual: int


def unequal_turns(waiting: RankLog, partner: RankLog, call: Collective) -> Turns | None:
    """The row of messages that ends with this call, which the partner has not answered; None if the row is no longer.

    A row is the calls of one line, one directly after the other. Messages with third ranks may come in between.
    """
    own, theirs = _between(waiting, partner.rank), _between(partner, waiting.rank)
    other = "recv" if call.op == "send" else "send"
    answers = list(itertools.dropwhile(lambda each: (each.op, each.peer) != (other, waiting.rank), theirs))
    made = _length_of_row(own)
    answered = _length_of_row(answers)
    if not 1 <= answered == made - 1:
        return None
    rows = itertools.groupby(answers[answered:], lambda each: (each.op, each.site))
    earlier = {len(list(row)) for key, row in rows if key == (answers[0].op, answers[0].site)}
    return Turns(answers[0], answered, earlier.pop() if len(earlier) == 1 else 0)


def _between(log: RankLog, partner: int) -> list[Collective]:
    """The calls of a rank without its messages to and from third ranks, the latest first."""
    return [each for each in reversed(log.calls) if each.op not in MARKS and each.peer in (None, partner)]


def _length_of_row(calls: Sequence[Collective]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda each: (each.op, each.site) == (calls[0].op, calls[0].site), calls))


def unequal_message(logs: Sequence[RankLog]) -> Difference | None:
    """The first message that a rank takes into a tensor of another size.

    A smaller one may be meant so. Only if a larger one has come as well, or first, has the job failed of it. A message
    with as many numbers of another size is always misread.
    """
    if any(log.dropped or any(call.op == "recv_any" for call in log.calls) for log in logs):
        return None  # messages are paired by their number
    sent, taken = (_messages(logs, op) for op in ("send", "recv"))
    unequal = [
        (call.time, at, pair, call, other)
        for pair, calls in sent.items()
        for at, (call, other) in enumerate(zip(calls, taken.get(pair, ()), strict=False))
        if call.nbytes != other.nbytes and call.nbytes and other.nbytes
    ]
    if all(call.nbytes < other.nbytes and not is_misread(call, other) for *_, call, other in unequal):
        return None
    _, at, (source, target, _), call, other = min(unequal, key=lambda each: each[0])
    return Difference(
        kind="content",
        group="0",
        culprits=(source,),
        others=(target,),
        call=call,
        expected=other,
        before=None,
        index=at,
        by="nothing",
    )


def is_misread(sent: Collective, taken: Collective) -> bool:
    """Whether a message of so many numbers is taken into a tensor for as many numbers of another size."""
    return sent.op == "send" and sent.shapes == taken.shapes and sent.nbytes != taken.nbytes


def _messages(logs: Sequence[RankLog], op: str) -> dict[tuple[int, int, int], list[Collective]]:
    """The messages between all ranks of the job by source, target and tag."""
    found: dict[tuple[int, int, int], list[Collective]] = {}
    for log in logs:
        for call in log.calls:
            if call.op == op and call.peer is not None and call.group == "0":
                pair = (log.rank, call.peer) if op == "send" else (call.peer, log.rank)
                found.setdefault((*pair, call.tag), []).append(call)
    return found


def unequal_parts(group: str, streams: Mapping[int, Sequence[Collective]]) -> Difference | None:
    """The first `all_to_all` in which a rank sends another more or less than that takes, with these two numbers."""
    order = sorted(streams)  # as torch orders the members of a group
    places = [at for at, call in enumerate(streams[order[0]]) if call.op == "all_to_all"]
    for at in places:
        calls = [calls[at] for rank in order if at < len(calls := streams[rank])]
        if len(calls) < len(order) or any([*map(len, call.shapes)] != [len(order)] * 2 for call in calls):
            return None
        for row, one in enumerate(calls):
            for column, other in enumerate(calls):
                sent, taken = one.shapes[0][column], other.shapes[1][row]
                if sent != taken:
                    return Difference(
                        kind="content",
                        group=group,
                        culprits=(order[row],),
                        others=(order[column],),
                        call=msgspec.structs.replace(one, shapes=((sent,),)),
                        expected=msgspec.structs.replace(other, shapes=((taken,),)),
                        before=streams[order[row]][at - 1] if at else None,
                        index=at,
                        by="nothing",
                    )
    return None
