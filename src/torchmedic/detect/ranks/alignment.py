"""Where the logs of several ranks first differ, and which rank left the common way.

Collectives of one group pair up by their order, not by their line. A rank that makes one call too many or too few
therefore fails only later, at a pair that does not fit. So the logs are compared by call site first: the first call
that only some ranks make is the cause, and all that follows is an echo of it.

A call at another line is no difference by itself: `if rank == 0: broadcast(x) else: broadcast(y)` is healthy. It is
one only if the calls cannot be paired, or if the pairs after it are shifted.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence

from torchmedic.detect.ranks.comparable import by_group, is_compared
from torchmedic.detect.ranks.messages import unequal_parts
from torchmedic.records.ranks import BACKWARD, Collective, Difference, DifferenceKind, FoundBy, RankLog

_WINDOW = 256  # calls after the first difference that are compared
_CONTEXT = 8  # calls before a difference that tell what follows on them as a rule
_END = -1


def first_difference(logs: Sequence[RankLog]) -> Difference | None:
    """Compare the logs of all ranks, group by group; the earliest difference is returned."""
    found = [
        difference
        for group, streams in by_group(logs).items()
        if len(streams) > 1
        for difference in (unequal_parts(group, streams), _of_threads(group, streams))
        if difference is not None
    ]
    if any(not _is_of_side_thread(each) for each in found):  # a second thread may be late where its rank has failed
        found = [each for each in found if each.kind != "stopped" or not _is_of_side_thread(each)]
    first = min(found, key=_begun, default=None)
    if first is not None and first.kind == "stopped" and len(found) > 1:  # ranks may wait for each other in two groups
        return next((each for each in found if _went_past(each, logs)), first)
    return first


def _is_of_side_thread(difference: Difference) -> bool:
    return difference.expected is not None and difference.expected.thread > 0


def _of_threads(group: str, streams: Mapping[int, Sequence[Collective]]) -> Difference | None:
    """Compare the calls of one group. Those of each thread come first: their order has nothing to do with chance.

    Second threads are numbered by their first call, so with several of them only the first thread can be compared.
    """
    threads = sorted({call.thread for calls in streams.values() for call in calls})
    for thread in threads[: 2 if len(threads) == 2 else 1] if len(threads) > 1 else ():
        own = {rank: [call for call in calls if call.thread == thread] for rank, calls in streams.items()}
        found = _compare(group, own)
        if found is not None and found.kind != "stopped":
            return found
    return _compare(group, streams)


def _went_past(difference: Difference, logs: Sequence[RankLog]) -> bool:
    """Whether the culprit waits at a line that another rank came to after the line of the expected call."""
    if difference.kind != "stopped" or difference.expected is None:
        return False
    sites = {log.rank: [call.site for call in log.calls if is_compared(call)] for log in logs}
    own, expected = sites.pop(difference.culprits[0]), difference.expected.site
    if not own or expected in own:
        return False
    return any(expected in each and own[-1] in each[each.index(expected) :] for each in sites.values())


def _begun(difference: Difference) -> float:
    calls = (difference.before, difference.call, difference.expected)
    return next((call.time for call in calls if call is not None), 0.0)


def _compare(group: str, streams: Mapping[int, Sequence[Collective]]) -> Difference | None:
    tokens = _tokens(streams)
    classes = _classes(tokens)
    start = 0
    while True:
        index = _first_unequal(list(classes), start)
        if index is None:
            return None
        parts = _parts(classes, index)
        healthy = _healthy_until(parts, tokens, streams, index)
        if healthy is None:
            return _judge(group, streams, tokens, parts, index)
        start = healthy


def _tokens(streams: Mapping[int, Sequence[Collective]]) -> dict[int, tuple[int, ...]]:
    """Each call as a number: equal where call site and content are."""
    known: dict[object, int] = {}
    return {
        rank: tuple(known.setdefault((call.content, call.path), len(known)) for call in calls)
        for rank, calls in streams.items()
    }


def _classes(tokens: Mapping[int, tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """The ranks by their stream: nearly all have the same."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, stream in tokens.items():
        found.setdefault(stream, []).append(rank)
    return found


def _first_unequal(streams: list[tuple[int, ...]], start: int) -> int | None:
    """The first place from `start` on at which two streams differ, or one ends and another does not."""
    if len(streams) < 2:
        return None
    shortest, longest = min(map(len, streams)), max(map(len, streams))
    first = streams[0]
    low, high = start, shortest  # equal below `low`; bisection on slices is a comparison in C
    while low < high:
        middle = (low + high + 1) // 2
        if all(stream[low:middle] == first[low:middle] for stream in streams[1:]):
            low = middle
        else:
            high = middle - 1
    return low if low < longest else None


def _parts(classes: Mapping[tuple[int, ...], list[int]], index: int) -> dict[int, list[int]]:
    """The ranks by what they call at a place."""
    found: dict[int, list[int]] = {}
    for stream, ranks in classes.items():
        found.setdefault(stream[index] if index < len(stream) else _END, []).extend(ranks)
    return found


def _healthy_until(
    parts: Mapping[int, list[int]],
    tokens: Mapping[int, tuple[int, ...]],
    streams: Mapping[int, Sequence[Collective]],
    index: int,
) -> int | None:
    """Where the streams come together again if the calls differ in their lines only; None if they do not fit."""
    if _END in parts:
        return None
    chosen = [ranks[0] for ranks in parts.values()]
    if len({streams[rank][index].content for rank in chosen}) > 1:
        return None
    first = chosen[0]
    ends = [index + 1]
    for rank in chosen[1:]:
        blocks = _blocks(tokens[first], tokens[rank], index)
        if not blocks or blocks[0][0] != "replace":
            return None
        _, low, high, other_low, other_high = blocks[0]
        same = [streams[first][at].content for at in range(low, high)]
        if same != [streams[rank][at].content for at in range(other_low, other_high)]:
            return None  # a shift begins here
        if (high, other_high) == (len(tokens[first]), len(tokens[rank])) and _are_of_other_models(
            streams[first], streams[rank], high
        ):
            return None
        ends.append(high)
    return max(ends)


def _are_of_other_models(one: Sequence[Collective], other: Sequence[Collective], end: int) -> bool:
    """Whether the last backwards, at lines that never met before, may belong to different models.

    After the forwards of several models, the mark of a backward cannot tell which of them it belongs to.
    """
    pairs = [(a.path, b.path) for a, b in zip(one[:end], other[:end], strict=False) if a.op == b.op == BACKWARD]
    return (
        len(pairs) > 1 and pairs[-1][0] != pairs[-1][1] and pairs[-1] not in pairs[:-1] and one[end - 1].op == BACKWARD
    )


def _blocks(one: tuple[int, ...], other: tuple[int, ...], index: int) -> list[tuple[str, int, int, int, int]]:
    """How one stream becomes the other from a place on."""
    matcher = difflib.SequenceMatcher(
        None, one[index : index + _WINDOW], other[index : index + _WINDOW], autojunk=False
    )
    return [
        (tag, a + index, b + index, c + index, d + index) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"
    ]


def _judge(
    group: str,
    streams: Mapping[int, Sequence[Collective]],
    tokens: Mapping[int, tuple[int, ...]],
    parts: Mapping[int, list[int]],
    index: int,
) -> Difference:
    common, by = _common(tokens, parts, index)
    others = sorted(parts[common]) if common is not None else []
    culprits = sorted(rank for token, ranks in parts.items() if token != common for rank in ranks)
    if common is None:  # nobody can be named; the first two ways are shown
        first, second = sorted(parts.values(), key=min)[:2]
        culprits, others = sorted(second), sorted(first)
    call = _at(streams[culprits[0]], index)
    expected = _at(streams[others[0]], index)
    usual = tokens[others[0]][:index].count(tokens[others[0]][index]) if expected is not None else 0
    return Difference(
        kind=_kind(call, expected, tokens[culprits[0]], tokens[others[0]], index),
        group=group,
        culprits=tuple(culprits),
        others=tuple(others),
        call=call,
        expected=expected,
        before=_at(streams[others[0]], index - 1) if index else None,
        index=index,
        by=by,
        usual=usual,
    )


def _common(
    tokens: Mapping[int, tuple[int, ...]], parts: Mapping[int, list[int]], index: int
) -> tuple[int | None, FoundBy]:
    """Which of the calls at a place is the common way, and how that is known; None where nothing tells."""
    if len(parts) == 2 and _END in parts:
        return next(token for token in parts if token != _END), "end"
    total = sum(map(len, parts.values()))
    most = max(parts, key=lambda token: len(parts[token]))
    if 2 * len(parts[most]) > total > 2:
        return most, "majority"
    sides = {tokens[ranks[0]][:index] for ranks in parts.values()} if index else set()
    for length in range(1, _CONTEXT + 1):  # of the calls in front of the place that are looked for in earlier steps
        habits = [_after(calls, length) for calls in sides]
        usual = [token for token in parts if token != _END and habits and all(token in each for each in habits)]
        if len(usual) == 1:
            return usual[0], "habit"
        if not usual:
            break
    return _by_insertion(tokens, parts, index)


def _after(calls: tuple[int, ...], length: int) -> set[int]:
    """What followed on the last calls of a stream, this many of them, where they were made before."""
    last = calls[-length:]
    return {calls[at + length] for at in range(len(calls) - length) if calls[at : at + length] == last}


def _by_insertion(
    tokens: Mapping[int, tuple[int, ...]], parts: Mapping[int, list[int]], index: int
) -> tuple[int | None, FoundBy]:
    """A call that nobody else ever makes, after which the rank goes the way of the others, was inserted."""
    rows = [(token, ranks[0]) for token, ranks in parts.items() if token != _END]
    everywhere = {token: {rank for rank, stream in tokens.items() if token in stream} for token, _ in rows}
    alone = [token for token, _ in rows if everywhere[token] <= set(parts[token])]
    shared = [token for token, _ in rows if token not in alone]
    if len(shared) == 1 and alone:
        return shared[0], "insertion"
    return None, "nothing"


def _kind(
    call: Collective | None, expected: Collective | None, own: tuple[int, ...], common: tuple[int, ...], index: int
) -> DifferenceKind:
    if call is None:
        return "stopped"
    if expected is None:
        return "extra"
    if call.path == expected.path and call.op == expected.op:
        return "content"
    blocks = _blocks(common, own, index)
    if blocks and blocks[0][0] == "insert":
        return "extra"
    if blocks and blocks[0][0] == "delete":
        return "missing"
    if _is_skipped(common, own[index], index) or (common[index] not in own and own[index] in common):
        return "missing"
    return "other"


def _is_skipped(common: tuple[int, ...], own: int, index: int) -> bool:
    """Whether the call of the others came before that of this rank in earlier steps: then the rank has left it out."""
    theirs, latest = common[index], common[:index][::-1]
    return (own, theirs) in itertools.pairwise(latest) or (theirs in latest and own in latest[: latest.index(theirs)])


def _at(calls: Sequence[Collective], index: int) -> Collective | None:
    return calls[index] if 0 <= index < len(calls) else None
