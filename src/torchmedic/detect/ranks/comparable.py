"""The calls of each group that can be compared between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torchmedic.records.ranks import BACKWARD, FORWARD, MARKS, POINT_TO_POINT, Collective, RankLog


def by_group(logs: Sequence[RankLog]) -> dict[str, dict[int, list[Collective]]]:
    """The collectives of each group by rank, from the first call on that all logs still hold.

    A rank that was killed has left only its calls from Python: then only those are compared, and backwards of
    DistributedDataParallel stand for the collectives in them.
    """
    complete = all(log.complete for log in logs)
    found: dict[str, dict[int, list[Collective]]] = {}
    for log in logs:
        for call in log.calls:
            if is_compared(call, complete=complete):
                found.setdefault(call.group, {}).setdefault(log.rank, []).append(call)
    for group, members in _members(logs).items():
        streams = found.get(group, {})
        if streams.keys() <= members:
            for rank in members if streams else ():
                streams.setdefault(rank, [])
    if any(log.dropped for log in logs):
        for streams in found.values():
            _cut(streams)
    return found


def _members(logs: Sequence[RankLog]) -> dict[str, set[int]]:
    """The ranks of each group, by its name: torch numbers the groups in the order in which all ranks make them."""
    found = {"0": {log.rank for log in logs}}
    whole = next((log for log in logs if not log.dropped), None)
    made = [call for call in whole.calls if call.op == "new_group"] if whole is not None else []
    for number, call in enumerate(made, 1):
        if call.shapes:
            found[str(number)] = set(call.shapes[0]) & found["0"]
    return found


def is_compared(call: Collective, *, complete: bool = True) -> bool:
    """Whether all ranks of the group must make this call."""
    if call.op == BACKWARD or call.native:
        return complete is call.native
    return call.op not in POINT_TO_POINT and call.op != FORWARD


def _cut(streams: dict[int, list[Collective]]) -> None:
    """Drop the calls that the ring of another rank has overwritten.

    Calls from Python are counted, and marks are counted apart from them.
    """
    counted = any(_is_counted(call) for calls in streams.values() for call in calls)
    anchors = {
        rank: [
            (at, call.ordinal) for at, call in enumerate(calls) if (_is_counted(call) if counted else not call.native)
        ]
        for rank, calls in streams.items()
    }
    start = max((found[0][1] for found in anchors.values() if found), default=0)
    for rank, calls in streams.items():
        del calls[: next((at for at, ordinal in anchors[rank] if ordinal >= start), 0)]


def _is_counted(call: Collective) -> bool:
    return not call.native and call.op not in MARKS
