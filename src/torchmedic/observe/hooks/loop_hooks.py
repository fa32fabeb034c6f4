"""Places in torch that only the ledger of the loop listens to: they are passed rarely, or once a step at most."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import utils as nn_utils
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler

from torchmedic.observe.hooks import Step
from torchmedic.observe.hooks.patches import wrap
from torchmedic.observe.loop.ledger import Habits

Wrapped = Callable[..., Any]
_is_compiling = torch.compiler.is_compiling  # asked first, so that compiled code is not specialised on the rest


class HabitHooks:
    """Feeds the ledger from modes, clipping, scaling and schedules."""

    def __init__(self, habits: Habits, step: Step) -> None:
        self._habits = habits
        self._step = step

    def install(self) -> None:
        from torch.amp.grad_scaler import GradScaler

        wrap(nn.Module, "zero_grad", self._around_zero_grad)
        wrap(nn.Module, "eval", self._around_eval)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(clip_grad, name, self._around_clip)
            wrap(nn_utils, name, self._around_clip)
        wrap(GradScaler, "scale", self._around_scale)
        wrap(GradScaler, "unscale_", self._around_unscale)
        wrap(GradScaler, "step", self._around_scaler_step)
        wrap(LRScheduler, "step", self._around_schedule)
        wrap(torch.cuda, "empty_cache", self._around_empty_cache)

    @property
    def _sleeps(self) -> bool:
        return not self._habits.awake or self._step.paused

    def _around_zero_grad(self, original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or self._sleeps:
                return original(module, *args, **kwargs)
            self._habits.zero_begins(module, sys._getframe(1))
            result = original(module, *args, **kwargs)
            self._habits.zero_ended(module)
            return result

        return zero_grad

    def _around_eval(self, original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def eval(module: nn.Module) -> Any:
            result = original(module)
            if _is_compiling():
                return result
            habits = self._habits
            if (habits.awake or habits.listening) and not self._step.paused:
                habits.evaluated(module, sys._getframe(1))
            return result

        return eval

    def _around_clip(self, original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or self._sleeps:
                return original(*args, **kwargs)
            bound = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
            self._habits.clip_begins(bound, sys._getframe(1))
            result = original(*args, **kwargs)
            self._habits.clip_ended()
            return result

        return clip

    def _around_scale(self, original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            if not _is_compiling() and not self._sleeps:
                self._habits.scaled(scaler)
            return original(scaler, outputs)

        return scale

    def _around_unscale(self, original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            if _is_compiling() or self._sleeps:
                return original(scaler, optimizer)
            self._habits.unscale_begins(optimizer, sys._getframe(1))
            result = original(scaler, optimizer)
            self._habits.unscale_ended(optimizer)
            return result

        return unscale_

    def _around_scaler_step(self, original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_compiling() and not self._sleeps:
                self._habits.scaler_steps(optimizer, sys._getframe(1))
            return original(scaler, optimizer, *args, **kwargs)

        return step

    def _around_empty_cache(self, original: Wrapped) -> Wrapped:
        """Time the user's call, for a few steps. The call waits for the device anyway."""

        @functools.wraps(original)
        def empty_cache() -> Any:
            if _is_compiling() or self._sleeps:
                return original()
            self._habits.cache_emptying(sys._getframe(1))
            result = original()
            self._habits.cache_emptied()
            return result

        return empty_cache

    def _around_schedule(self, original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_compiling() and not self._sleeps and not getattr(scheduler, "_is_initial", False):
                self._habits.scheduled(scheduler, sys._getframe(1), explicit=bool(args or kwargs))
            return original(scheduler, *args, **kwargs)

        return step
