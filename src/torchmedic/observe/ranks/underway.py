"""Exchanges of gradients that are still under way when the weights are updated: nobody has waited for them.

Only tensors of the CPU are looked at. On a GPU, a call that was waited for may still run: its stream keeps the order.
"""

from __future__ import annotations

from collections import deque
from types import FrameType
from typing import Any

from torch import Tensor

from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import StackFrame
from torchmedic.source.user_code import user_frame

_MAX_BEGUN = 1024  # calls under way at the same time


class Underway:
    """The calls since the last update, from the first that was not complete when the last call began."""

    def __init__(self) -> None:
        self._begun: deque[tuple[Any, list[int], StackFrame]] = deque(maxlen=_MAX_BEGUN)

    def begun(self, work: Any, tensors: Any, frame: FrameType) -> None:
        """A call has been made; `frame` is one below the user's."""
        while self._begun and self._begun[0][0].is_completed():
            self._begun.popleft()
        own = user_frame(frame)
        if own is not None and work is not None and isinstance(tensors, list):
            places = [each.data_ptr() for each in tensors if type(each) is Tensor and each.is_cpu]
            line = StackFrame(file=own.f_code.co_filename, line=own.f_lineno, function=own.f_code.co_name)
            self._begun.append((work, places, line))

    def at_update(self, optimizer: Any) -> StackFrame | None:
        """The line of a call that still changes a gradient of an optimizer whose update begins."""
        pending = [(places, line) for work, places, line in self._begun if not work.is_completed()]
        self._begun.clear()
        if not pending:
            return None
        given = (each.grad for each in parameters_of(optimizer))
        gradients = {each.data_ptr() for each in given if each is not None and each.is_cpu}
        return next((line for places, line in pending if not gradients.isdisjoint(places)), None)
