"""Numbers that `ReduceLROnPlateau` takes for a plateau, because it waits for them to change in the other direction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from torch.optim.lr_scheduler import ReduceLROnPlateau

_MIN_FALLS = 4
_MIN_FALLING = 0.75  # of the changes of a number
_PER_CENT = 100.0
_MAX_ITEMS = 10_000  # of which a part was counted
_NO_DIFFERENCE = 1e-12
_MIN_STANDING = 5  # numbers that a schedule was given
_MAX_LEFT = 0.5  # of the first number
_NEAR_LOWEST = 0.02  # of the way from the first number to the lowest


def mistaken_for_plateau(schedule: ReduceLROnPlateau, metrics: Sequence[float]) -> str:
    """What the numbers do that a schedule takes for a plateau, as it waits for the opposite; empty if it may be right.

    A loss may well rise from the first epoch on, so numbers that rise must be shares: an accuracy.
    """
    if schedule.mode == "max":
        return "falling" if _falls(metrics) or _has_fallen_at_once(metrics) else ""
    is_accuracy = bool(metrics) and _are_shares(metrics) and metrics[-1] > _whole(metrics) / 2
    return "rising" if is_accuracy and _falls([-metric for metric in metrics]) else ""


def _are_shares(metrics: Sequence[float]) -> bool:
    """Whether numbers are parts of a whole, in per cent or not."""
    whole = _whole(metrics)
    return all(
        0 <= metric <= whole and abs(Fraction(metric).limit_denominator(_MAX_ITEMS) - Fraction(metric)) < _NO_DIFFERENCE
        for metric in metrics
    )


def _whole(metrics: Sequence[float]) -> float:
    return 1.0 if max(metrics, default=0.0) <= 1 else _PER_CENT


def _has_fallen_at_once(metrics: Sequence[float]) -> bool:
    """Whether numbers that are no accuracy fell to a part of the first one, until the rate itself was cut too far."""
    return (
        len(metrics) >= _MIN_STANDING
        and not _are_shares(metrics)
        and metrics[2] < metrics[1] < metrics[0]
        and 0 <= max(metrics[2:]) < _MAX_LEFT * metrics[0]
    )


def _falls(metrics: Sequence[float]) -> bool:
    """Whether numbers fall nearly always until they are near the lowest, and never come back to where they began."""
    if not metrics:
        return False
    near = min(metrics) + _NEAR_LOWEST * (metrics[0] - min(metrics))
    # With a rate that has fallen to nothing they stay where they are.
    until = next((at for at, metric in enumerate(metrics) if metric <= near), 0)  # none of NaN
    falls = [after < before for before, after in itertools.pairwise(metrics[: until + 1])]
    is_enough = len(falls) >= _MIN_FALLS and sum(falls) >= _MIN_FALLING * len(falls)
    return is_enough and max(metrics[1:]) < metrics[0]
