"""A `GradScaler` scales a loss, and lets an optimizer step or leaves the step out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torchmedic.contained import contained
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.hooks.optimizer import OptimizerHooks
from torchmedic.observe.hooks.patches import without_our_frame, wrap


class ScalerHooks:
    """Wraps `GradScaler.scale` and `GradScaler.step`."""

    def __init__(self, step: Step, optimizers: OptimizerHooks) -> None:
        self._step = step
        self._optimizers = optimizers

    def install(self) -> None:
        from torch.amp.grad_scaler import GradScaler

        wrap(GradScaler, "scale", self._around_scale)
        wrap(GradScaler, "step", self._around_step)

    def _around_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = contained("observe.scaler")(self._step.finite.scaled)

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            try:
                result = original(scaler, outputs)
            except BaseException as error:
                without_our_frame(error)
                raise
            note(outputs, result)
            return result

        return scale

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._step.fast.has_begun = False
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            except BaseException as error:
                without_our_frame(error)
                raise
            self._ends(scaler, optimizer)
            return result

        return step

    @contained("observe.scaler")
    def _ends(self, scaler: Any, optimizer: Any) -> None:
        """A step that the scaler skips is a step of the loop all the same."""
        if self._step.fast.has_begun:
            return
        self._step.fast.has_begun = True
        step = self._step
        if step.finite.on and not step.paused:
            step.finite.step_skipped(scaler, optimizer, sys._getframe(1))
        self._optimizers.note_end(optimizer, stepped=False)
