"""Exchanges of gradients before the backward that computes them: each rank then updates with its own."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

from torch import Tensor

from torchmedic.observe.ranks.call_site import MAX_USER_FRAMES
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import StackFrame
from torchmedic.source.user_code import user_frame

_MAX_TENSORS = 1024
_MAX_UPDATES = 64  # that are looked at: with `fully_shard` there are exchanges before each backward


class EarlyExchanges:
    """The exchanges between an update and the first backward after it. Single numbers, such as a loss, do not count."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._updated = 0, 0  # the step and its backwards at the last update
        self._optimizer: weakref.ref[Any] | None = None  # that made this update,
        self._gradients: frozenset[int] | None = None  # and the addresses of its gradients at the first exchange since
        self._lines: dict[int, tuple[StackFrame, ...]] = {}  # by the address of such a gradient
        self._is_late = False  # whether a tensor was exchanged after a backward
        self._updates = 0

    def exchanged(self, tensors: Any, frame: FrameType) -> None:
        given = tensors if isinstance(tensors, list) and self._updates < _MAX_UPDATES else []
        found = [each for each in given if type(each) is Tensor and each.numel() > 1]
        if self._clock.micro_step and (self._clock.step, self._clock.micro_step) != self._updated:
            self._is_late |= bool(found)
        elif found and self._optimizer is not None and len(self._lines) < _MAX_TENSORS:
            if self._gradients is None:  # what is at these addresses later may be another tensor
                self._gradients = _gradients(self._optimizer())
            at = [place for each in found if (place := each.data_ptr()) in self._gradients]
            if at and (lines := _user_lines(frame)):
                self._lines.update(dict.fromkeys(at, lines))

    def at_update(self, optimizer: Any) -> tuple[StackFrame, ...]:
        """The user's lines, innermost first, that exchanged a gradient too early, if nothing was exchanged later."""
        self._updates += 1
        early, is_late = self._lines, self._is_late
        self._lines, self._is_late, self._updated = {}, False, (self._clock.step, self._clock.micro_step)
        self._optimizer, self._gradients = weakref.ref(optimizer), None
        now = _gradients(optimizer) if early and not is_late else ()
        return next((lines for at, lines in early.items() if at in now), ())


def _gradients(optimizer: Any) -> frozenset[int]:
    given = (each.grad for each in parameters_of(optimizer)) if optimizer is not None else ()
    return frozenset(each.data_ptr() for each in given if type(each) is Tensor)


def _user_lines(frame: FrameType | None) -> tuple[StackFrame, ...]:
    found: list[StackFrame] = []
    while len(found) < MAX_USER_FRAMES and (own := user_frame(frame)) is not None:
        found.append(StackFrame(file=own.f_code.co_filename, line=own.f_lineno, function=own.f_code.co_name))
        frame = own.f_back
    return tuple(found)
