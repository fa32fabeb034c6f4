"""Messages between two ranks: `send` and `recv` pair up by their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torchmedic.records.ranks import MARKS, Collective, RankLog


def unmatched(logs: Iterable[RankLog]) -> list[tuple[int, Collective]]:
    """The last `send` or `recv` of each rank that has no partner on the other rank, by rank."""
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
        last = next((call for call in reversed(log.calls) if call.op not in MARKS), None)
        if last is None or last.peer is None:
            continue
        pair = (log.rank, last.peer, last.tag) if last.op == "send" else (last.peer, log.rank, last.tag)
        own, partner = (sent, received) if last.op == "send" else (received, sent)
        if last.op in ("send", "recv") and own[pair] > partner[pair]:
            found.append((log.rank, last))
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
