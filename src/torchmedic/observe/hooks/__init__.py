"""The places in torch where training can be seen to move: data, forward, backward, optimizer, scaler."""

from __future__ import annotations

from torchmedic.contained import contained
from torchmedic.observe.hooks import patches
from torchmedic.observe.hooks.backward import BackwardHooks
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.hooks.data import DataHooks
from torchmedic.observe.hooks.forward import ForwardHooks
from torchmedic.observe.hooks.optimizer import OptimizerHooks
from torchmedic.observe.hooks.scaler import ScalerHooks

__all__ = ["Hooks", "Step"]


class Hooks:
    """All hooks, put in place or removed together."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.forward = ForwardHooks(step)
        self._data = DataHooks(step, self.forward)
        self._backward = BackwardHooks(step, self.forward)
        self._optimizers = OptimizerHooks(step, self.forward)
        self._scaler = ScalerHooks(step, self._optimizers)

    def install(self) -> None:
        """Put every hook in place; one that cannot be leaves the others working."""
        for part in (self._data, self._backward, self._optimizers, self._scaler):
            contained("observe.install")(part.install)()
        self.step.fast.leave()
        self.step.noting = False
        self.step.trust_notes()
        self.step.finite.on = False
        self.step.trust_numbers()

    def remove(self) -> None:
        """Leave torch as it was; `install` puts everything back."""
        self.step.fast.leave()
        self._optimizers.remove()
        self.forward.remove()
        patches.take_back()
