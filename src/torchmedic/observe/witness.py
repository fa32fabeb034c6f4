"""One parameter of an optimizer, whose gradient tells what happens to all of them."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

_SMALL = 1 << 16  # elements of a gradient that is measured


class State(NamedTuple):
    """The gradient's own number (0 where there is none), how often it was written to, and how often the weights were."""

    gradient: int
    writes: int
    weight_writes: int


class Witness:
    """Asked before and after every event; holds nothing alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self.identity = id(tensor)
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._number = 0

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._tensor()

    def look(self) -> State:
        tensor = self._tensor()
        if tensor is None:
            return State(-1, 0, 0)
        gradient = tensor.grad
        if gradient is None:
            return State(0, 0, tensor._version)
        if self._gradient is None or self._gradient() is not gradient:
            self._number += 1
            self._gradient = weakref.ref(gradient)
        return State(self._number, gradient._version, tensor._version)

    def norm(self, *, wait: bool) -> float | None:
        """The norm of the gradient; None where it would have to be waited for, or cannot be read."""
        tensor = self._tensor()
        gradient = tensor.grad if tensor is not None else None
        if gradient is None:
            return 0.0
        if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided or gradient.numel() > _SMALL:
            return None
        if not gradient.is_cpu and not (wait and gradient.is_cuda and not torch.cuda.is_current_stream_capturing()):
            return None
        return float(torch.linalg.vector_norm(gradient.detach()).item())
