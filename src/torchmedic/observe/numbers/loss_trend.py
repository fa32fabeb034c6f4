"""The losses of one backward call: whether they rise, and whether training is lost."""

from __future__ import annotations

from math import inf

RISE = 3.0  # times its usual size: a loss that rises
_FIRST_LOSSES = 8
_LOST = 1e4  # times the smallest of the first losses
_LOST_SIZE = 100.0
_ABSURD = 1e18  # a loss that is lost whatever the first ones were
_FAR = 8.0  # times the lowest level that the loss has had
_FAR_OF_FIRST = 0.5  # of the first loss: all that was learned is lost
_FAR_BELOW_ZERO = 8.0  # times the size of the first loss
_DIP = 1  # updates with a far loss that one with an ordinary loss outweighs: most of the losses must be far


class LossTrend:
    """The losses of one backward call."""

    def __init__(self, loss: float) -> None:
        self.usual = abs(loss)
        self.lost = 0  # updates in a row whose loss was far beyond the first ones
        self.far = 0  # updates with a loss far from its earlier level, for as long as most of the losses are
        self._first = [loss]
        self._lowest = abs(loss)  # usual size so far
        self.limit = inf  # a larger loss is far beyond the first ones

    def note(self, loss: float) -> bool:
        """Whether a loss is many times its usual size."""
        usual, size = self.usual, abs(loss)
        rises = size > RISE * usual
        self.usual = usual + 0.1 * (min(size, 2 * usual) - usual)
        self._lowest = min(self._lowest, self.usual)
        if len(self._first) < _FIRST_LOSSES:
            self._first.append(loss)
            self.limit = min(max(_LOST_SIZE, _LOST * min(map(abs, self._first))), _ABSURD)
        self.lost = self.lost + 1 if size > self.limit else 0
        self.far = self.far + 1 if self._is_far(loss) else max(0, self.far - _DIP)
        return rises

    def _is_far(self, loss: float) -> bool:
        """Whether a loss is far above its lowest level and its beginning, or far below zero."""
        first = self._first[0]
        if loss < 0:
            return loss < -_FAR_BELOW_ZERO * max(1.0, abs(first))
        return min(self._first) > 0 and loss > max(_FAR * self._lowest, _FAR_OF_FIRST * first)
