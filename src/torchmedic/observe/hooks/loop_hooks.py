"""Places in torch that only the ledger of the loop listens to: they are passed rarely, or once a step at most."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import utils as nn_utils
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchmedic.contained import contained
from torchmedic.observe.hooks import Step
from torchmedic.observe.hooks.patches import (
    NoticedCall,
    assign,
    compiler,
    has_arguments,
    is_traced,
    replace,
    without_our_frame,
    wrap,
)
from torchmedic.observe.loop.event_writer import EventWriter

Wrapped = Callable[..., Any]


class HabitHooks:
    """Feeds the ledger from modes, clipping, scaling and schedules."""

    def __init__(self, habits: EventWriter, step: Step) -> None:
        self._habits = habits
        self._step = step
        self._calls: dict[tuple[CodeType, int], bool] = {}  # of schedulers: whether they have arguments

    def install(self) -> None:
        from torch.amp.grad_scaler import GradScaler

        around, habits = self._around, self._habits
        around(
            *(nn.Module, "zero_grad"),
            lambda frame, module, *_, **__: habits.zero_begins(module, frame),
            lambda frame, module, *_, **__: habits.zero_ended(module),
        )
        around(nn.Module, "eval", None, lambda frame, module: habits.evaluated(module, frame), while_listening=True)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            around(clip_grad, name, self._clip_begins, lambda frame, *_, **__: habits.clip_ended())
            assign(nn_utils, name, getattr(clip_grad, name))
        around(nn.Module, "load_state_dict", habits.loading, habits.loaded, while_listening=True)
        around(GradScaler, "scale", lambda frame, scaler, *_, **__: habits.scaled(scaler))
        around(
            *(GradScaler, "unscale_"),
            lambda frame, scaler, optimizer: habits.unscale_begins(optimizer, frame),
            lambda frame, scaler, optimizer: habits.unscale_ended(optimizer),
        )
        around(GradScaler, "step", lambda frame, scaler, optimizer, *_, **__: habits.scaler_steps(optimizer, frame))
        around(torch.cuda, "empty_cache", habits.cache_emptying, lambda frame: habits.cache_emptied())
        around(
            *(ReduceLROnPlateau, "step"),
            lambda _, schedule, metrics=None, *__, **___: habits.measured(schedule, metrics),
            while_listening=True,
        )
        for kind in (LRScheduler, ReduceLROnPlateau):
            replace(kind, "step", NoticedCall(kind.step, self._scheduled))

    @property
    def _sleeps(self) -> bool:
        return not self._habits.awake or self._step.paused

    def _around(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
        *,
        while_listening: bool = False,
    ) -> None:
        """Call `before(frame, *arguments)` and `after(frame, *arguments)` around a function of torch's."""
        before = contained("observe.habits")(before) if before is not None else None
        after = contained("observe.habits")(after) if after is not None else None

        def make(original: Wrapped) -> Wrapped:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if is_traced() or compiler._is_compiling_flag:
                    return original(*args, **kwargs)
                hears = not self._sleeps or (while_listening and self._habits.listening and not self._step.paused)
                if hears and before is not None:
                    before(sys._getframe(1), *args, **kwargs)
                try:
                    result = original(*args, **kwargs)
                except BaseException as error:
                    without_our_frame(error)
                    raise
                if hears and after is not None:
                    after(sys._getframe(1), *args, **kwargs)
                return result

            return call

        wrap(owner, name, make)

    def _clip_begins(self, frame: FrameType, *args: Any, **kwargs: Any) -> None:
        bound = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
        self._habits.clip_begins(args[0] if args else kwargs.get("parameters"), bound, frame)

    def _scheduled(self, scheduler: Any, frame: FrameType) -> None:
        is_initial = getattr(scheduler, "_step_count", None) == 0  # the call of its own constructor
        if self._step.ranks is not None and not is_initial:
            self._step.ranks.seen_at("scheduling", frame)
        if not self._sleeps and not is_initial:
            self._habits.scheduled(scheduler, frame, explicit=has_arguments(frame, self._calls))
