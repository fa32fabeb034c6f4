"""Leaf tensors whose gradient has a graph, which leads back to the leaf: a cycle that nobody breaks.

`backward(create_graph=True)` makes such circles. They lie inside of autograd, where Python's collector does not see
them, so they end only when `.grad` is set to None or to something else. Counted only in runs that make them.
"""

from __future__ import annotations

import gc
from types import FrameType

import torch

from torchmedic.source.spots import NOWHERE, Place
from torchmedic.source.user_code import user_frame

_MAX_COUNTS = 12  # each takes some hundredths of a second


class GradientCycles:
    """Counts such leaves, at some looks."""

    def __init__(self) -> None:
        self.place = NOWHERE  # of the backward that makes them
        self._counted = 0

    @property
    def wanted(self) -> bool:
        return bool(self.place.line) and self._counted < _MAX_COUNTS

    def made(self, frame: FrameType) -> None:
        """A backward with `create_graph=True` writes to `.grad`."""
        user = user_frame(frame)
        if user is not None:
            self.place = Place(user.f_code.co_filename, user.f_lineno)

    def count(self) -> int:
        self._counted += 1
        found = 0
        for thing in gc.get_objects():
            kind = type(thing)
            if (kind is torch.Tensor or kind is torch.nn.Parameter) and thing.is_leaf and thing.requires_grad:
                gradient = thing.grad
                found += gradient is not None and gradient.grad_fn is not None
        return found
