"""The losses of one backward call: whether they rise, whether training is lost, and whether one update kills layers.

Such an update makes the loss jump. The loss may be small again afterwards, but no gradient reaches the layers. So the
gradients are looked at once, some updates after a jump.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from torchmedic.observe.numbers.windows import Window
from torchmedic.observe.step.tensors import parameters_of

RISE = 3.0  # times its usual size: a loss that rises
_FIRST_LOSSES = 8
_LOST = 1e4  # times the smallest of the first losses
_LOST_SIZE = 100.0
ABSURD = 1e18  # a loss that is lost whatever the first ones were
_FAR = 8.0  # times the lowest level that the loss has had
_FAR_OF_FIRST = 0.5  # of the first loss: all that was learned is lost
_FAR_BELOW_ZERO = 8.0  # times the size of the first loss
_STILL = 0.02  # of the first losses
_AT_CHANCE = 0.9  # of the first loss: that of a model that guesses is a little above what guessing comes to
_DIP = 1  # updates with a far loss that one with an ordinary loss outweighs: most of the losses must be far


class LossTrend:
    """The losses of one backward call."""

    def __init__(self, loss: float) -> None:
        self.usual = abs(loss)
        self.lost = 0  # updates in a row whose loss was far beyond the first ones
        self.far = 0  # updates with a loss far from its earlier level, for as long as most of the losses are
        self.stuck = 0  # updates with a loss about the first or above it, since a rise at the very beginning
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
            self.limit = min(max(_LOST_SIZE, _LOST * min(map(abs, self._first))), ABSURD)
        self.lost = self.lost + 1 if size > self.limit else 0
        self.stuck = self.stuck + 1 if self._is_stuck(loss) else max(0, self.stuck - _DIP)
        self.far = self.far + 1 if self._is_far(loss) else max(0, self.far - _DIP)
        return rises

    @property
    def is_still(self) -> bool:
        """Whether the loss has neither risen nor fallen since the first ones."""
        first = sum(map(abs, self._first)) / len(self._first)
        return abs(self.usual - first) <= _STILL * first

    def _is_stuck(self, loss: float) -> bool:
        """Whether the first updates have made the loss many times larger, and a loss is not clearly below the first."""
        first = self._first[0]
        has_jumped = max(self._first) > RISE * first > 0
        return has_jumped and loss >= _AT_CHANCE * first

    def _is_far(self, loss: float) -> bool:
        """Whether a loss is far above its lowest level and its beginning, or far below zero."""
        first = self._first[0]
        if loss < 0:
            return loss < -_FAR_BELOW_ZERO * max(1.0, abs(first))
        return min(self._first) > 0 and loss > max(_FAR * self._lowest, _FAR_OF_FIRST * first)


_JUMP = 10.0  # times its usual size
_HUGE_JUMP = 1e4  # times its usual size: one dead layer is enough
_MAX_JUMPS = 4  # after which the gradients are looked at
_UPDATES_AFTER_JUMP = 16


class LossJumps:
    """Notes jumps of the loss; `StepMemory` calls it."""

    def __init__(self) -> None:
        self.windows: list[Window] = []  # what can be run again of the updates that end in a jump
        self.updates_left = 0  # until the gradients are looked at; 0: there was no jump
        self._count = 0
        self._is_huge = False  # the last one

    def note(self, loss: float, usual: float, departure: Callable[[], list[Window]]) -> None:
        """Note a loss that rises.

        Args:
            loss: The loss.
            usual: The usual size of losses before this one.
            departure: Gives what can be run again now.
        """
        if loss > _JUMP * usual and not self.updates_left and self._count < _MAX_JUMPS:
            self._count += 1
            self._is_huge = loss > _HUGE_JUMP * usual
            self.updates_left = _UPDATES_AFTER_JUMP
            self.windows = departure()

    def has_killed(self, optimizer: Any, loss: float | None, *, is_readable: bool) -> bool:
        """Whether it is time to look, and no gradient reaches matrices of an optimizer.

        Args:
            optimizer: Is about to step.
            loss: The present one: a hinge that is 0 has no gradient, and nothing is dead.
            is_readable: Whether its gradients can be read without waiting.
        """
        self.updates_left -= 1
        if self.updates_left:
            return False
        if loss == 0:
            self.updates_left = 1  # the next update is asked
            return False
        matrices = [tensor.grad for tensor in parameters_of(optimizer) if tensor.dim() > 1] if is_readable else []
        dead = sum(gradient is not None and not bool(gradient.any()) for gradient in matrices)
        is_dead = dead > (0 if self._is_huge else len(matrices) / 2)
        self.windows = self.windows if is_dead else []
        return is_dead
