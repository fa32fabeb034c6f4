"""Whether training was running away before it overflowed: the trend of the loss over the last steps."""

from __future__ import annotations

import math
from typing import NamedTuple

from torchmedic.evidence.numbers import NumbersEvidence

_STEPS = 3  # of growth in a row, at least
_MIN_GROWTH_FACTOR = 100.0


class Growth(NamedTuple):
    """A loss that only grew, to many times what it was."""

    steps: int
    start: float
    end: float
    last: tuple[float, ...]


def growth(evidence: NumbersEvidence) -> Growth | None:
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
    return Growth(steps, finite[start], finite[-1], tuple(finite[-6:]))


def _usual(sizes: list[float]) -> float:
    ordered = sorted(sizes)
    return ordered[len(ordered) // 2] if ordered else 0.0


def is_diverging(evidence: NumbersEvidence) -> bool:
    return growth(evidence) is not None
