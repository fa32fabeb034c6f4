"""Weights that each rank trains by itself, beside others whose gradients are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchmedic.records import StackFrame
from torchmedic.records.rank_facts import JobFacts, RankFacts, TrainedModel
from torchmedic.records.ranks import MARKS, WRAPPED, Collective, RankLog
from torchmedic.source.branches import branches_around, exits_before, loops_around

_MIN_DIFFERENCE = 1e-4  # of the size of a weight
_MIN_TURNS = 4  # updates of each model among the first ones
_MOST = 0.9  # of the updates: the number of those of one model is known by its share of the first ones
_COMPRESSED = 4  # times smaller than a gradient is what may be sent in its place
# Calls that hold what a model computes, as where its parts lie on different ranks.
_HIDDEN = frozenset({"all_to_all", "all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single"})
_MESSAGES = frozenset({"send", "recv", "recv_any"})


class LeftOut(NamedTuple):
    """A weight of the model, with its size on every rank, and the line that updates it."""

    shape: tuple[int, ...]
    sizes: tuple[tuple[int, float], ...]
    line: StackFrame


def model_left_out(job: JobFacts) -> LeftOut | None:
    """The first model that was equal on all ranks, was never exchanged, and differs; None if no other is exchanged."""
    facts, logs = job.ranks, job.logs
    if not job.ended or len(logs) < len(facts) or any(log.dropped for log in logs) or _may_differ(facts):
        return None
    rows = [*zip(*(each.models for each in facts), strict=False)]
    if len({len(each.models) for each in facts}) > 1 or len(rows) < 2:
        return None
    if any(len({(each.shapes, each.turns) for each in row}) > 1 or row[0].turns < _MIN_TURNS for row in rows):
        return None
    shared = [all(_is_exchanged(*each, row[0]) for each in zip(facts, logs, strict=True)) for row in rows]
    if not any(shared) or any(_exchanges_hidden_states(each, log) for each, log in zip(facts, logs, strict=True)):
        return None
    for row in rows:
        line, index = row[0].updating, _differing([each.last for each in row])
        if any(each.is_wrapped for each in row) or index is None or line is None:
            continue
        if _differing([each.start for each in row]) is None and not any(
            _may_be_sent(*each, row[0]) for each in zip(facts, logs, strict=True)
        ):
            sizes = tuple((each.rank, model.last[index]) for each, model in zip(facts, row, strict=True))
            return LeftOut(row[0].shapes[index], sizes, line)
    return None


def _may_differ(facts: Sequence[RankFacts]) -> bool:
    """Whether the ranks may differ on purpose, or were not looked at after the same number of updates."""
    seen = {each.weights[-1].updates if each.weights else 0 for each in facts}
    return len(seen) > 1 or any(each.is_apart or each.unsynced for each in facts)


def _differing(sizes: Sequence[tuple[float, ...]]) -> int | None:
    for index, values in enumerate(zip(*sizes, strict=False)):
        low, high = min(values), max(values)
        if high - low > _MIN_DIFFERENCE * max(abs(high), 1e-12):
            return index
    return None


def _is_exchanged(facts: RankFacts, log: RankLog, model: TrainedModel) -> bool:
    """Whether the gradients of a model are exchanged: it is wrapped, or its weights are sent for every update."""
    if model.is_wrapped:
        return bool(facts.forwards)
    sent = [shape for call in _calls(log) if call.op == "all_reduce" for shape in call.shapes]
    return all(sent.count(shape) >= max(_MOST * _updates_of(model, facts), 1) for shape in model.shapes)


def _may_be_sent(facts: RankFacts, log: RankLog, model: TrainedModel) -> bool:
    """Whether calls may hold the gradients or weights of a model, one by one or in flat tensors, compressed perhaps.

    One `broadcast` of each weight, as at the start, does not count.
    """
    calls = [call for call in _calls(log) if call.op != "broadcast"]
    if any(shape in call.shapes for call in calls for shape in model.shapes):
        return True
    known = {shape for each in facts.models for shape in each.shapes}
    flat = sum(call.nbytes for call in calls if [*map(len, call.shapes)] == [1] and call.shapes[0] not in known)
    if _COMPRESSED * flat >= model.nbytes * _updates_of(model, facts):
        return True
    given = [shape for call in _calls(log) if call.op == "broadcast" for shape in call.shapes]
    return any(given.count(shape) >= model.turns for shape in model.shapes)


def _updates_of(model: TrainedModel, facts: RankFacts) -> float:
    return facts.weights[-1].updates * model.turns / sum(each.turns for each in facts.models)


def _exchanges_hidden_states(facts: RankFacts, log: RankLog) -> bool:
    """Whether the ranks exchange what they compute in every other update or more often."""
    made = sum(call.op in _HIDDEN or call.op in _MESSAGES for call in log.calls if not call.native)
    return 2 * made >= facts.weights[-1].updates


def _calls(log: RankLog) -> list[Collective]:
    return [call for call in log.calls if not call.native and call.op not in MARKS and call.op != WRAPPED]


def exchanging_line(log: RankLog, shapes: Sequence[tuple[int, ...]]) -> StackFrame | None:
    """The line that exchanges gradients; in a loop over parameters, that of the `if` that skips some of them."""
    found = (call for call in reversed(log.calls) if call.op == "all_reduce" and set(call.shapes) & set(shapes))
    frame = next((call.frames[0] for call in found if call.frames), None)
    loop = next(iter(loops_around(frame.file, frame.line)), None) if frame is not None else None
    if frame is None or loop is None or "param" not in loop.header:
        return frame
    skips = (*exits_before(frame.file, frame.line), *branches_around(frame.file, frame.line))
    inside = [each.line for each in skips if loop.line < each.line <= loop.end and "grad" not in each.test]
    return msgspec.structs.replace(frame, line=inside[0] if inside else loop.line)
