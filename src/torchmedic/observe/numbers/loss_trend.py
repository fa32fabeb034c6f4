"""The size of the losses of one backward call: whether they rise, and whether they are beyond recovery."""

from __future__ import annotations

from math import inf

RISE = 3.0  # times its usual size: a loss that rises
_FIRST_LOSSES = 8
_LOST = 1e4  # times the smallest of the first losses
_LOST_SIZE = 100.0


class LossTrend:
    """The size of the losses of one backward call."""

    def __init__(self, loss: float) -> None:
        self.usual = loss
        self.lost = 0  # updates in a row whose loss was far beyond the first ones
        self._first = [loss]
        self._limit = inf

    def note(self, loss: float) -> bool:
        """Whether a loss is many times its usual size."""
        usual = self.usual
        rises = loss > RISE * usual
        self.usual = usual + 0.1 * (min(loss, 2 * usual) - usual)
        if len(self._first) < _FIRST_LOSSES:
            self._first.append(loss)
            self._limit = max(_LOST_SIZE, _LOST * min(self._first))
        self.lost = self.lost + 1 if loss > self._limit else 0
        return rises
