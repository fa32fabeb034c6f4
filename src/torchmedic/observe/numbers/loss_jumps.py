"""A single update that kills layers: the loss jumps, and may be small again afterwards, but no gradient reaches them.

After a jump of the loss the gradients are looked at once, some updates later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmedic.observe.numbers.windows import Window
from torchmedic.observe.step.tensors import parameters_of

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
