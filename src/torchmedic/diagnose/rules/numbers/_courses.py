"""What the rules on runaway training have in common: the courses of the loss, said as numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.diagnose.rules.numbers._huge_weights import huge_weights
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Grade, Location, Treatment
from torchmedic.replay.trajectory.course import Course
from torchmedic.source.lookup.named_numbers import ANY, set_and_used
from torchmedic.source.lookup.optimizers import rate_given_at
from torchmedic.source.spots import Spot

_ADAPTIVE_RATE = 0.01  # of Adam and the like: an ordinary rate is not above it
_PLAIN_RATE = 0.2  # of SGD
_MIN_GROWING_STEPS = 3  # in a row
_MIN_GROWTH_FACTOR = 100.0
_MIN_MOVED = 0.02  # of their own size: weights that are nearer have not made a loss a hundred times as large
_LOSSES_OF_QUARTERS = 48  # the last ones, in which the level of the loss grows from quarter to quarter
_GROWTH_OF_QUARTER = 3.0  # times the level of the quarter before
_GROWN_WEIGHTS = 1e4  # times their size some updates ago: no training means that
_FEW_UPDATES = 6
_GROWN_AT_ONCE = 30.0  # times their size before so few updates


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
    draft.mark(evidence.noticed, "surfaced", "noticed here")
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
    draft.at(*set_and_used(factor, product, f"the factor is {factor:.6g}", ANY, blames_name=True))


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
    if len(finite) < _MIN_GROWING_STEPS + 1:
        return None
    sizes = [abs(loss) for loss in finite]
    start = len(sizes) - 1
    # A step back on the way up is allowed, two in a row are not.
    while start > 0 and (sizes[start - 1] < sizes[start] or (start > 1 and sizes[start - 2] < sizes[start])):
        start -= 1
    steps = len(sizes) - 1 - start
    lowest = max(min(sizes[start:]), 1e-12)
    if steps < _MIN_GROWING_STEPS or sizes[-1] < _MIN_GROWTH_FACTOR * max(lowest, _usual(sizes[: start + 1])):
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
    found = (growth(evidence), grown_weights(evidence), huge_weights(evidence))
    return any(each is not None for each in found)
