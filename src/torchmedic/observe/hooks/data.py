"""A batch is asked for, and comes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import dataloader

from torchmedic.contained import contained
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.hooks.forward import ForwardHooks
from torchmedic.observe.hooks.patches import wrap
from torchmedic.observe.step.clock import DATA
from torchmedic.source.user_code import PACKAGE, is_user_file, user_frame

_LOADING = os.path.dirname(os.path.abspath(dataloader.__file__)) + os.sep


class DataHooks:
    """Wraps the iterators of `DataLoader`."""

    def __init__(self, step: Step, forward: ForwardHooks) -> None:
        self._step = step
        self._forward = forward

    def install(self) -> None:
        iterator = dataloader._BaseDataLoaderIter
        wrap(iterator, "__next__", self._around_next)
        wrap(iterator, "_next_index", self._around_next_index)

    def _around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            self._requested(iterator)
            try:
                batch = original(iterator)
            except BaseException:
                self._failed(iterator)
                raise
            self._arrived(iterator, batch)
            return batch

        return __next__

    def _around_next_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = contained("observe.batches")(self._step.batches.index_drawn)

        @functools.wraps(original)
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            note(iterator, index)
            return index

        return _next_index

    @contained("observe.data")
    def _requested(self, iterator: Any) -> None:
        step = self._step
        if step.paused:
            return
        if step.leaks is not None and iterator._num_yielded == 0:
            step.leaks.loading(iterator, sys._getframe(1))
        if step.is_sampled_out:
            step.short_steps.data_requested(iterator)
            return
        step.clock.data_requested()
        step.clock.enter(DATA, sys._getframe(1))
        step.batches.requested(iterator)

    @contained("observe.data")
    def _failed(self, iterator: Any) -> None:
        if not self._step.paused:
            self._step.batches.taken(iterator)

    @contained("observe.data")
    def _arrived(self, iterator: Any, batch: Any) -> None:
        step = self._step
        if step.paused:
            return
        if step.is_sampled_out:
            step.short_steps.data_arrived(iterator, batch)
            return
        batches = step.batches
        batches.taken(iterator)
        direct = _asked_by_user(sys._getframe(1))
        batches.arrived(batch, direct=direct)
        if step.habits.awake:
            step.habits.fetched(iterator, batches.origin[0], sys._getframe(1), direct=direct)
        step.clock.leave()
        step.opens(user_frame(sys._getframe(1)))
        self._forward.expect()


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the user's own code asked for a batch, rather than a library that may fetch ahead."""
    while frame is not None and frame.f_code.co_filename.startswith((PACKAGE, _LOADING)):
        frame = frame.f_back
    return frame is None or is_user_file(frame.f_code.co_filename)
