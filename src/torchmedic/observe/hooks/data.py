"""A batch is asked for, and comes."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from itertools import repeat
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.data import dataloader

from torchmedic.contained import contained, is_below_compiled, report_fault
from torchmedic.observe.device.hidden_work import dispatch_modes, function_modes, is_profiling
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.hooks.forward import ForwardHooks
from torchmedic.observe.hooks.patches import NoticedResult, compiler, is_traced, leave_to_python, replace
from torchmedic.observe.step.batches import MAX_FLAT
from torchmedic.observe.step.clock import DATA
from torchmedic.source.user_code import PACKAGE, is_user_file, user_frame

_Tensor, _weak_reference = torch.Tensor, weakref.ref
_InProcess = dataloader._SingleProcessDataLoaderIter
_LOADING = os.path.dirname(os.path.abspath(dataloader.__file__)) + os.sep


class DataHooks:
    """Wraps the iterators of `DataLoader`."""

    def __init__(self, step: Step, forward: ForwardHooks) -> None:
        self._step = step
        self._forward = forward

    def install(self) -> None:
        iterator = dataloader._BaseDataLoaderIter
        step = self._step
        batches, fast, late = step.batches, step.fast, step.finite.losses.late
        draw = iterator._next_index
        drawn = contained("observe.batches", computes=False)(batches.index_drawn)
        record = contained("observe.batches", computes=False)(self._record)

        # The fast paths do in one frame what `Batches` has methods for, and are contained by themselves.

        def index_drawn(owner: Any, index: Any) -> Any:
            if fast.on:
                try:
                    current = batches.last_pass
                    sampling = getattr(owner, "_sampler_iter", None)
                    if current is not None and current.iterator() is owner and current.sampling is sampling:
                        current.pending.append(index)
                        return index
                except Exception as error:
                    self._quick_failed("observe.batches", error)
            drawn(owner, index)
            if type(owner) is _InProcess and "_next_index" not in owner.__dict__:
                record(owner, draw)
            return index

        def requested(owner: Any) -> None:
            if fast.on and not batches.is_asked:
                try:
                    if owner._num_yielded:  # else a pass over the data begins
                        batches.requested(owner)
                        return
                except Exception as error:
                    self._quick_failed("observe.data", error)
            fast.on = False
            self._requested(owner, sys._getframe(2))

        def arrived(owner: Any, batch: Any) -> Any:
            is_kept = late.are_usual  # which takes operations of torch
            if fast.on and not is_kept and batches.is_asked:
                # Nearly always: a few plain tensors, of the pass that gave the last ones.
                kind, current = type(batch), batches.last_pass
                is_flat = (kind is list or kind is tuple) and len(batch) <= MAX_FLAT
                if is_flat and current is not None and current.iterator is batches.asked and current.pending:
                    weak = []
                    for each in batch:
                        if type(each) is not _Tensor:
                            break
                        weak.append(_weak_reference(each))
                    else:
                        batches.is_asked = False
                        batches.number += 1
                        current.taken += 1
                        indices = current.last = current.pending.popleft()
                        batches.came_last.append((weak, indices, current.iterator, None))
                        return batch
            if fast.on and not (
                is_kept and (dispatch_modes() or function_modes() or is_profiling() or is_below_compiled())
            ):
                try:
                    batches.came(owner, batch, is_kept=is_kept)
                except Exception as error:
                    self._quick_failed("observe.data", error)
            elif step.is_sampled_out and step.ranks is None:
                self._arrived_sampled_out(owner, batch)
            else:
                self._arrived(owner, batch, sys._getframe(1))
            return batch

        notices = NoticedBatch(iterator.__next__, requested, arrived, step)
        looks: tuple[Any, ...] = (NoticedResult.__get__, NoticedBatch.__get__)
        for each in (index_drawn, requested, arrived, batches.requested, batches.came, *looks):
            leave_to_python(each)
        replace(iterator, "__next__", notices)
        replace(iterator, "_next_index", NoticedResult(draw, None, index_drawn))

    def _record(self, iterator: Any, draw: Callable[[Any], Any]) -> None:
        """Have an iterator without workers note its indices by itself, which takes less than the look-up of our hook.

        It makes each batch at once, so one index at most has not come back. It cannot be pickled.
        """
        current = self._step.batches.last_pass
        is_its_own = current is not None and current.iterator() is iterator
        if current is None or not is_its_own:
            return
        current.pending = deque(current.pending, maxlen=1)
        append = current.pending.append

        def noted(index: Any) -> Any:
            append(index)
            return index

        leave_to_python(noted)
        # The iterator must not hold itself. `map` calls from C: it is no frame.
        iterator._next_index = map(noted, map(draw, repeat(weakref.proxy(iterator)))).__next__

    def _quick_failed(self, where: str, error: Exception) -> None:
        self._step.fast.on = False
        report_fault(where, error)

    @contained("observe.data", computes=False)
    def _requested(self, iterator: Any, frame: FrameType) -> None:
        step = self._step
        if step.paused:
            return
        if step.batches.is_asked:
            self._failed()
        if step.leaks is not None and iterator._num_yielded == 0:
            step.leaks.loading(iterator, frame)
        if iterator._num_yielded == 0 and (step.habits.awake or step.habits.passes.on):
            step.habits.pass_begins(iterator, step.clock.updates, frame)
        step.clock.data_requested()
        if not step.is_sampled_out:
            step.clock.enter(DATA, frame)
        step.batches.requested(iterator)

    def _failed(self) -> None:
        """The batch that was asked for last has not come: its indices are those of no later one."""
        batches = self._step.batches
        iterator = batches.asked() if batches.asked is not None else None
        if iterator is not None:
            batches.taken(iterator)

    @contained("observe.data")
    def _arrived(self, iterator: Any, batch: Any, frame: FrameType) -> None:
        step = self._step
        if step.paused:
            return
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
            in_loop = direct or _asked_by_user(frame, through_iterators=True)
            step.habits.fetched(iterator, batches.origin[0], batch, frame, direct=in_loop)
        step.clock.leave()
        step.opens(user_frame(frame))
        self._forward.expect()

    @contained("observe.data")
    def _arrived_sampled_out(self, iterator: Any, batch: Any) -> None:
        """A batch has come in a step that is sampled out. Where losses are read late, it is needed after the step."""
        step = self._step
        if step.paused:
            return
        step.batches.came(iterator, batch, is_kept=step.finite.losses.late.are_usual)


class NoticedBatch(NoticedResult):
    """`NoticedResult` for an iterator of batches. What `before` does in nearly every fast step, it does by itself."""

    def __init__(
        self,
        original: Callable[[Any], Any],
        before: Callable[[Any], None],
        after: Callable[[Any, Any], Any],
        step: Step,
    ) -> None:
        super().__init__(original, before, after)
        self._fast, self._batches = step.fast, step.batches

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        original = self._original
        if owner is None or is_traced() or compiler._is_compiling_flag:
            return original.__get__(owner, kind)
        batches = self._batches
        if (
            self._fast.on
            and (asked := batches.asked) is not None
            and asked() is owner
            and not batches.is_asked
            and batches.direct
            and owner._num_yielded  # type: ignore[union-attr]
        ):
            batches.requests += 1
            batches.is_asked = True
            batches.kept = None
        else:
            self._before(owner)  # type: ignore[misc]
        owners = repeat(owner)
        return map(self._after, owners, map(original, owners)).__next__


def _asked_by_user(frame: FrameType | None, *, through_iterators: bool = False) -> bool:
    """Whether the user's own code asked for a batch, rather than a library that may fetch ahead.

    Args:
        frame: Where the batch is asked for.
        through_iterators: Look past the iterators of libraries, such as a progress bar or a prepared loader. These may
            fetch ahead too, but a loop of the user's takes the batches one by one.
    """
    while frame is not None and (
        frame.f_code.co_filename.startswith((PACKAGE, _LOADING)) or (through_iterators and _is_iterator(frame.f_code))
    ):
        frame = frame.f_back
    return frame is None or is_user_file(frame.f_code.co_filename)


def _is_iterator(code: CodeType) -> bool:
    is_one = bool(code.co_flags & inspect.CO_GENERATOR) or code.co_name == "__next__"
    return is_one and not is_user_file(code.co_filename)
