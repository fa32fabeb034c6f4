"""The vertical axis of a curve: where a value lies between bottom and top, and which values are labelled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchmedic.report.html.series import ScaleKind

_MAX_DECADES = 5  # that are labelled
_PADDING = 0.06  # above and below a curve that does not begin at zero


class Scale(NamedTuple):
    """Values from `low` to `high`; `ticks` are labelled."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """The height of a value, from 0 to 1."""
        if self.is_log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def scale_of(values: Sequence[float], kind: ScaleKind) -> Scale:
    """A scale on which all values lie. A logarithmic one needs values above zero."""
    if kind == "zero":
        return _from_zero(max(values, default=1.0))
    low, high = min(values, default=0.0), max(values, default=1.0)
    if kind == "log":
        first = math.floor(math.log10(low))
        last = max(math.ceil(math.log10(high)), first + 1)
        powers = range(first, last + 1, -(-(last - first) // _MAX_DECADES))
        return Scale(10.0**first, 10.0**last, True, tuple(10.0**power for power in powers))
    pad = _PADDING * (high - low) or 0.5 * abs(high) or 1.0
    low, high = low - pad, high + pad
    step = _decimal_step((high - low) / 4)
    ticks = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Scale(low, high, False, tuple(ticks))


def _from_zero(most: float) -> Scale:
    """Three to five labels from zero to above `most`, at a power of two from each other, which suits bytes."""
    step = 2.0 ** math.ceil(math.log2(most / 4)) if most > 0 else 1.0
    ticks = [number * step for number in range(math.ceil(most / step) + 1)]
    return Scale(0.0, ticks[-1], False, tuple(ticks))


def _decimal_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
