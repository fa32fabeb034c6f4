"""How near the losses of a rerun are to the recorded ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

EQUAL = 1e-6  # relative difference of two losses that leaves no doubt
SAME = 1e-3  # relative difference of two losses that count as the same: kernels may add in any order
_MIN_ALIKE = 4  # losses
_ALIKE = 0.25  # logarithm of the quotient of two losses that count as alike
_ALIKE_OF_GROWTH = 0.2  # of the logarithm of the growth until then, which random numbers change as well


def grow_alike(losses: Sequence[float], recorded: Sequence[float]) -> bool:
    """Whether losses grow as the recorded ones did, but for random numbers that are not known."""
    both = list(zip(losses, recorded, strict=False))
    pairs = [(now, then) for now, then in both if math.isfinite(then)]
    ends_alike = any(not math.isfinite(now) and not math.isfinite(then) for now, then in both)
    if len(pairs) + ends_alike < _MIN_ALIKE:
        return False
    first = max(abs(pairs[0][1]), 1e-12)
    for now, then in pairs:
        growth = abs(math.log(max(abs(then), 1e-12) / first))
        if now * then <= 0 or not abs(math.log(now / then)) < _ALIKE + _ALIKE_OF_GROWTH * growth:
            return False
    return True


def difference_of(now: float, then: float | None, *, is_scaled: bool) -> float:
    """The relative difference of a loss from the recorded one; 0 where neither is finite, or nothing was recorded.

    Args:
        now: The loss of a replay, which leaves the factor of a GradScaler out.
        then: The loss that was recorded.
        is_scaled: Whether the factor, a power of two, is in what was recorded.
    """
    if then is None or (not math.isfinite(now) and not math.isfinite(then)):
        return 0.0
    if is_scaled and math.isfinite(now) and math.isfinite(then) and now * then > 0:
        then /= 2.0 ** round(math.log2(then / now))
    difference = abs(now - then) / max(abs(now), abs(then), 1e-12)
    return difference if math.isfinite(difference) else math.inf
