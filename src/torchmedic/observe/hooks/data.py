"""A batch is asked for, and comes."""

from __future__ import annotations

import os
import sys
import weakref
from types import FrameType
from typing import Any

from torch.utils.data import dataloader

from torchmedic.contained import contained
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.hooks.forward import ForwardHooks
from torchmedic.observe.hooks.patches import NoticedResult, replace
from torchmedic.observe.step.clock import DATA
from torchmedic.source.user_code import PACKAGE, is_user_file, user_frame

_LOADING = os.path.dirname(os.path.abspath(dataloader.__file__)) + os.sep


class DataHooks:
    """Wraps the iterators of `DataLoader`."""

    def __init__(self, step: Step, forward: ForwardHooks) -> None:
        self._step = step
        self._forward = forward
        self._awaited: weakref.ref[Any] | None = None  # the iterator that was asked for a batch, until it gives one

    def install(self) -> None:
        iterator = dataloader._BaseDataLoaderIter
        drawn = contained("observe.batches", computes=False)(self._step.batches.index_drawn)

        def index_drawn(owner: Any, index: Any) -> Any:
            drawn(owner, index)
            return index

        step = self._step

        def arrived(owner: Any, batch: Any) -> Any:
            if step.is_sampled_out and step.ranks is None:
                self._arrived_sampled_out(owner, batch)
            else:
                self._arrived(owner, batch, sys._getframe(1))
            return batch

        replace(iterator, "__next__", NoticedResult(iterator.__next__, self._requested, arrived))
        replace(iterator, "_next_index", NoticedResult(iterator._next_index, None, index_drawn))

    @contained("observe.data", computes=False)
    def _requested(self, iterator: Any, frame: FrameType) -> None:
        step = self._step
        if step.paused:
            return
        if self._awaited is not None:
            self._failed()
        if step.leaks is not None and iterator._num_yielded == 0:
            step.leaks.loading(iterator, frame)
        step.clock.data_requested()
        if not step.is_sampled_out:
            step.clock.enter(DATA, frame)
        self._awaited = step.batches.requested(iterator)

    def _failed(self) -> None:
        """The batch that was asked for last has not come: its indices are those of no later one."""
        iterator = self._awaited() if self._awaited is not None else None
        if iterator is not None:
            self._step.batches.taken(iterator)

    @contained("observe.data")
    def _arrived(self, iterator: Any, batch: Any, frame: FrameType) -> None:
        step = self._step
        if step.paused:
            return
        self._awaited = None
        if step.ranks is not None and (step.ranks.wants_batches or iterator._num_yielded == 1):
            step.ranks.fetched(iterator, batch, frame)
        if step.is_sampled_out:
            self._arrived_sampled_out(iterator, batch)
            return
        batches = step.batches
        batches.taken(iterator)
        direct = _asked_by_user(frame)
        batches.arrived(batch, direct=direct)
        if step.habits.awake:
            step.habits.fetched(iterator, batches.origin[0], frame, direct=direct)
        step.clock.leave()
        step.opens(user_frame(frame))
        self._forward.expect()

    @contained("observe.data")
    def _arrived_sampled_out(self, iterator: Any, batch: Any) -> None:
        """A batch has come in a step that is sampled out. Where losses are read late, it is needed after the step."""
        step = self._step
        if step.paused:
            return
        self._awaited = None
        batches = step.batches
        batches.taken(iterator)
        batches.arrived(batch, direct=batches.is_direct, is_kept=step.finite.losses.late.are_usual)


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the user's own code asked for a batch, rather than a library that may fetch ahead."""
    while frame is not None and frame.f_code.co_filename.startswith((PACKAGE, _LOADING)):
        frame = frame.f_back
    return frame is None or is_user_file(frame.f_code.co_filename)
