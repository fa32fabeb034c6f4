"""What the rules on runaway training have in common: the courses of the loss, said as numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import torch

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Grade, Location, Treatment
from torchmedic.replay.trace.microscope import Leaf, Microscope, Op
from torchmedic.replay.trajectory.course import Course
from torchmedic.source.lookup.optimizers import rate_given_at, value_written_at
from torchmedic.source.spots import Spot

_ADAPTIVE_RATE = 0.01  # of Adam and the like: an ordinary rate is not above it
_PLAIN_RATE = 0.2  # of SGD
_STEPS = 3  # of growth in a row, at least
_MIN_GROWTH_FACTOR = 100.0
_MIN_MOVED = 0.02  # of their own size: weights that are nearer have not made a loss a hundred times as large
_LOSSES_OF_QUARTERS = 48  # the last ones, in which the level of the loss grows from quarter to quarter
_GROWTH_OF_QUARTER = 3.0
_GROWN_WEIGHTS = 1e4  # times their size some updates ago: no training means that
_FEW_UPDATES = 6
_GROWN_AT_ONCE = 30.0  # times their size before so few updates
_MIN_TURNS = 4
_MIN_FACTOR = 1.15  # per turn
_MIN_SHARE_GROWING = 0.8  # of all turns
_MIN_TOTAL = 1e5


def begin(
    rule: Rule[NumbersEvidence],
    evidence: NumbersEvidence,
    divergence: Divergence,
    message: str,
    cause: str,
    *,
    grade: Grade = "proven",
) -> Draft:
    """Begin a diagnosis of training that ran away."""
    if divergence.trajectory.is_rehearsed:
        goes = f"the loss of the present batch goes {course_text(divergence)}"
        return rule.draft(evidence, "likely", f"{message}: {goes}", cause)
    if not divergence.trajectory.is_exact:
        goes = f"in a rerun, which is not exact, the loss goes {course_text(divergence)}"
        return rule.draft(evidence, "likely", f"{message}: {goes}", cause)
    return rule.draft(evidence, grade, f"{message}: the loss went {course_text(divergence)}", cause)


def finish(draft: Draft, evidence: NumbersEvidence) -> Draft:
    """Add where the number was noticed. The overflowing line is no cause."""
    spot = evidence.spot
    if spot is not None and evidence.incident.quantity != "growth":
        draft.at(spot.location("surfaced", "a value overflowed here at last"))
    if evidence.noticed is not None:
        draft.at(evidence.noticed.location("surfaced", "noticed here"))
    return draft.because(evidence.complaint)


def course_text(divergence: Divergence) -> str:
    """`from 23.8 to infinity in 3 updates`."""
    losses = divergence.losses(divergence.original)
    worst = max(range(len(losses)), key=lambda at: abs(losses[at])) if math.isfinite(losses[-1]) else len(losses) - 1
    losses = losses[: worst + 1] if worst else losses
    last = losses[-1]
    end = f"{last:.3g}" if math.isfinite(last) else "NaN" if math.isnan(last) else "infinity"
    updates = max(1, len(losses) - 1)
    return f"from {losses[0]:.3g} to {end} in {updates} update{'s' if updates > 1 else ''}"


def cure(divergence: Divergence, title: str, tried: Iterable[tuple[str, Course | None]]) -> Treatment:
    """A treatment that turned the course, with the courses that were tried."""
    parts = [f"the loss as it was: {divergence.shown(divergence.original)}"]
    parts += [f"{label}: {divergence.shown(course)}" for label, course in tried if course is not None]
    return Treatment(
        title=title, safety="changes-training", proven=True, result="; ".join(parts), tried_on=divergence.tried_on
    )


def rates_of(divergence: Divergence, optimizer: Any, group: int | None = None) -> list[float]:
    """The learning rates of an optimizer, or of one of its groups, in the steps that were run again, highest first."""
    found = {
        float(rate)
        for unit in divergence.trajectory.units
        for end in unit.call.ends
        if end.optimizer() is optimizer
        for at, rate in enumerate(end.rates)
        if rate is not None and group in (None, at)
    }
    return sorted(found, reverse=True)


def is_ordinary_rate(divergence: Divergence) -> bool:
    """Whether no learning rate is above what is usual for its optimizer."""
    for optimizer in divergence.optimizers:
        rates = rates_of(divergence, optimizer)
        adaptive = any("betas" in group or "alpha" in group for group in optimizer.param_groups)
        if rates and rates[0] > (_ADAPTIVE_RATE if adaptive else _PLAIN_RATE):
            return False
    return True


def rate_location(evidence: NumbersEvidence, optimizer: Any, rate: float, group: int | None = None) -> Location | None:
    """What gives an optimizer a learning rate: its construction, or a schedule that went above that."""
    by = evidence.agent.clock.constructions.get(optimizer)
    return rate_given_at(evidence.frames, optimizer, rate, by=by, group=group)


def locate_factor(draft: Draft, spot: Spot, label: str, factor: float) -> None:
    """The line of a factor, where the script gives the factor a name, is the cause; else the product is."""
    product, factor = spot.location("cause", label), float(f"{factor:.4g}")
    written = value_written_at(factor, product, f"the factor is {factor:.6g}", role="cause", any_name=True)
    draft.at(written)
    draft.at(product if written is None else spot.location("origin", label))


class LossGrowth(NamedTuple):
    """A loss that only grew, to many times what it was."""

    steps: int
    start: float
    end: float
    last: tuple[float, ...]


class WeightGrowth(NamedTuple):
    """The largest weight some updates ago, and now."""

    start: float
    end: float
    updates: int


def growth(evidence: NumbersEvidence) -> LossGrowth | None:
    """The growth that ends in the present step; None where there is none to speak of, or the weights have no part."""
    found = _growth_of_losses(evidence)
    return None if found is None or _have_stayed(evidence, found.steps) else found


def _have_stayed(evidence: NumbersEvidence, steps: int) -> bool:
    """Whether the weights are where they were so many steps ago: then the data has changed, and not the model."""
    copies = [window.copy for window in evidence.agent.finite.memory.windows()]
    before = [copy for copy in copies if copy.update <= evidence.agent.clock.updates - steps]
    return bool(before) and max(copy.distance() for copy in before) < _MIN_MOVED


def _growth_of_losses(evidence: NumbersEvidence) -> LossGrowth | None:
    finite = [loss for loss in evidence.incident.losses if math.isfinite(loss)]
    if len(finite) < _STEPS + 1:
        return None
    sizes = [abs(loss) for loss in finite]
    start = len(sizes) - 1
    # A step back on the way up is allowed, two in a row are not.
    while start > 0 and (sizes[start - 1] < sizes[start] or (start > 1 and sizes[start - 2] < sizes[start])):
        start -= 1
    steps = len(sizes) - 1 - start
    lowest = max(min(sizes[start:]), 1e-12)
    if steps < _STEPS or sizes[-1] < _MIN_GROWTH_FACTOR * max(lowest, _usual(sizes[: start + 1])):
        return _growth_in_quarters(finite[-_LOSSES_OF_QUARTERS:])
    return LossGrowth(steps, finite[start], finite[-1], tuple(finite[-6:]))


def _growth_in_quarters(losses: list[float]) -> LossGrowth | None:
    """The growth of a loss that does not grow in every step: several batches belong to an update."""
    length = len(losses) // 4
    if length < 2:
        return None
    levels = [_usual([abs(loss) for loss in losses[at * length : (at + 1) * length]]) for at in range(4)]
    grows = all(later > _GROWTH_OF_QUARTER * max(earlier, 1e-12) for earlier, later in itertools.pairwise(levels))
    if not grows or levels[-1] < _MIN_GROWTH_FACTOR * levels[0]:
        return None
    return LossGrowth(len(losses) - 1, losses[0], losses[-1], tuple(losses[-6:]))


def _usual(sizes: list[float]) -> float:
    ordered = sorted(sizes)
    return ordered[len(ordered) // 2] if ordered else 0.0


def grown_weights(evidence: NumbersEvidence) -> WeightGrowth | None:
    """The growth since the oldest copy of the weights; None where there is none to speak of."""
    copy = evidence.agent.finite.memory.oldest_copy()
    if copy is None:
        return None
    pairs = [
        (float(value.abs().amax()), float(tensor.detach().abs().amax()))
        for tensor, value in copy.pairs()
        if value.numel() and tensor.requires_grad
    ]
    before, now = (max((pair[at] for pair in pairs), default=0.0) for at in (0, 1))
    updates = max(evidence.agent.finite.steps, evidence.incident.step) - copy.update  # some are made by hand
    factor = _GROWN_WEIGHTS if updates > _FEW_UPDATES else _GROWN_AT_ONCE
    is_grown = math.isfinite(now) and now > factor * max(before, 1e-3)
    return WeightGrowth(before, now, updates) if is_grown and updates > 0 and before > 0 else None


def is_diverging(evidence: NumbersEvidence) -> bool:
    return growth(evidence) is not None or grown_weights(evidence) is not None


def growths_at_start(evidence: NumbersEvidence) -> tuple[list[Growth], bool]:
    """The lines whose values grow geometrically, and whether they did so before training could spoil the weights."""
    if evidence.divergence is not None:
        scope = evidence.divergence.first_step()
        return (growths(scope), True) if scope is not None else ([], True)
    is_growth = evidence.incident.quantity == "growth"
    if evidence.scope is None or not (is_growth or (evidence.births and evidence.births[0].op is not None)):
        return [], False
    return growths(evidence.scope), evidence.incident.step == 0


class Growth(NamedTuple):
    """One line's values, growing by about the same factor each time that the line runs."""

    spot: Spot
    kind: str  # of the operation
    turns: int
    factor: float  # per turn
    first: float
    last: float  # the largest that is finite
    is_gradient: bool
    weights: tuple[
        torch.Tensor, ...
    ]  # that the line multiplies by: few for a recurrence, one per turn for a deep network
    is_by_weights: bool  # the operation itself multiplies by weights; else by a constant or by activations

    @property
    def is_recurrence(self) -> bool:
        return 2 * len(self.weights) <= self.turns


def growths(scope: Microscope) -> list[Growth]:
    """The growths in a replayed step, the strongest amplifier first. The scope must have been read."""
    found = []
    for is_gradient in (False, True):
        lines: dict[tuple[str, int], dict[str, list[Op]]] = {}
        for op in scope.ops:
            spot = scope.spot_of(op)
            if op.derived is is_gradient and spot is not None and op.outputs:
                lines.setdefault((spot.file, spot.line), {}).setdefault(op.kind, []).append(op)
        for kinds in lines.values():
            grown = [each for ops in kinds.values() if (each := _growth(scope, ops, is_gradient)) is not None]
            own = [op for ops in kinds.values() for op in ops] if grown else []
            # A line without weights of its own is a part of what runs between its turns.
            weights = tuple(_weights(scope, own)) or tuple(_weights(scope, _between(scope, own)))
            found += [(gain, growth._replace(weights=weights)) for gain, growth in grown]
    return [growth for _, growth in sorted(found, key=lambda each: (each[1].is_gradient, -each[0]))]


def _between(scope: Microscope, ops: list[Op]) -> list[Op]:
    own = {id(op) for op in ops}
    turns = [at for at, op in enumerate(scope.ops) if id(op) in own]
    return [op for op in scope.ops[turns[0] : turns[-1] + 1] if op.derived is ops[0].derived] if turns else []


def _growth(scope: Microscope, ops: list[Op], is_gradient: bool) -> tuple[float, Growth] | None:
    sizes = [scope.magnitude(op.outputs[0]) for op in ops]
    end = next((at for at, size in enumerate(sizes) if not math.isfinite(size)), len(sizes))
    start = next((at for at, size in enumerate(sizes[:end]) if size > 0), end)
    finite = sizes[start:end]
    if len(finite) < _MIN_TURNS or 0 in finite:
        return None
    ratios = [after / before for before, after in itertools.pairwise(finite)]
    total = finite[-1] / finite[0]
    growing = sum(ratio > 1.0 for ratio in ratios) / len(ratios)
    if total < _MIN_TOTAL or growing < _MIN_SHARE_GROWING or median(ratios) < _MIN_FACTOR:
        return None
    spot = scope.spot_of(ops[-1])
    assert spot is not None
    gains = [gain for op in ops[start:end] if (gain := _gain(scope, op)) is not None]
    factor = total ** (1 / len(ratios))
    is_by_weights = any(True for _ in _weights(scope, ops))
    growth = Growth(spot, ops[-1].kind, len(finite), factor, finite[0], finite[-1], is_gradient, (), is_by_weights)
    return (median(gains) if gains else 1.0), growth


def _gain(scope: Microscope, op: Op) -> float | None:
    """How many times larger the result of an operation is than what it was given by the step."""
    given = [scope.magnitude(value) for value in op.inputs if not isinstance(scope.source(value), Leaf)]
    largest = max(given, default=0.0)
    return scope.magnitude(op.outputs[0]) / largest if largest > 0 else None


def _weights(scope: Microscope, ops: Iterable[Op]) -> Iterable[torch.Tensor]:
    """The trained leaves that operations, or what these differentiate, are given as matrices."""
    seen: set[int] = set()
    for op in ops:
        for value in scope.forward_of(op).inputs:
            source = scope.source(value)
            is_weight = isinstance(source, Leaf) and source.tensor.requires_grad and source.tensor.dim() > 1
            if isinstance(source, Leaf) and is_weight and value.storage not in seen:
                seen.add(value.storage)
                yield source.tensor
