"""What the rules on runaway training have in common: the courses of the loss, said as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Diagnosis, Grade, Location, Treatment
from torchmedic.replay.trace.growth import Growth, growths
from torchmedic.replay.trajectory.course import Course

_ADAPTIVE_RATE = 0.01  # of Adam and the like: an ordinary rate is not above it
_PLAIN_RATE = 0.2  # of SGD
_STEPS = 3  # of growth in a row, at least
_MIN_GROWTH_FACTOR = 100.0
_GROWN_WEIGHTS = 1e4  # times their size some updates ago: no training means that


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
    return rule.draft(evidence, grade, f"{message}: the loss went {course_text(divergence)}", cause)


def finish(draft: Draft, evidence: NumbersEvidence) -> Diagnosis:
    """Add where the number was noticed. The overflowing line is no cause."""
    spot = evidence.spot
    if spot is not None and evidence.incident.quantity != "growth":
        draft.at(spot.location("surfaced", "a value overflowed here at last"))
    if evidence.noticed is not None:
        draft.at(evidence.noticed.location("surfaced", "noticed here"))
    draft.because(evidence.complaint)
    return draft.done()


def course_text(divergence: Divergence) -> str:
    """`from 23.8 to infinity in 3 updates`."""
    losses = divergence.losses(divergence.original)
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


def rates_of(divergence: Divergence, optimizer: Any) -> list[float]:
    """The learning rates of an optimizer in the steps that were run again, the highest first."""
    found = {
        float(rate)
        for unit in divergence.trajectory.units
        for end in unit.call.ends
        if end.optimizer() is optimizer
        for rate in end.rates
        if rate is not None
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


def location_of(spot: Any, label: str) -> Location | None:
    return spot.location("cause", label) if spot is not None else None


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
    """The growth that ends in the present step; None where there is none to speak of."""
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
        return None
    return LossGrowth(steps, finite[start], finite[-1], tuple(finite[-6:]))


def _usual(sizes: list[float]) -> float:
    ordered = sorted(sizes)
    return ordered[len(ordered) // 2] if ordered else 0.0


def grown_weights(evidence: NumbersEvidence) -> WeightGrowth | None:
    """The growth since the oldest copy of the weights; None where there is none to speak of."""
    windows = evidence.agent.finite.memory.windows()
    if not windows:
        return None
    pairs = [
        (float(value.abs().amax()), float(tensor.detach().abs().amax()))
        for reference, value in windows[0].copy.tensors
        if value.numel() and (tensor := reference()) is not None and tensor.requires_grad
    ]
    before, now = (max((pair[at] for pair in pairs), default=0.0) for at in (0, 1))
    updates = windows[0].calls[-1].update - windows[0].copy.update
    is_grown = math.isfinite(now) and now > _GROWN_WEIGHTS * max(before, 1e-3)
    return WeightGrowth(before, now, updates) if is_grown and updates > 0 and before > 0 else None


def is_diverging(evidence: NumbersEvidence) -> bool:
    return growth(evidence) is not None or grown_weights(evidence) is not None


def growths_at_start(evidence: NumbersEvidence) -> tuple[list[Growth], bool]:
    """The lines whose values grow geometrically, and whether they did so before training could spoil the weights."""
    if evidence.divergence is not None:
        scope = evidence.divergence.first_step()
        return (growths(scope), True) if scope is not None else ([], True)
    if evidence.scope is None or not evidence.births or evidence.births[0].op is None:
        return [], False
    return growths(evidence.scope), evidence.incident.step == 0
