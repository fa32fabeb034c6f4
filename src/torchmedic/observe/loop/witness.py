"""Two parameters of an optimizer, whose gradients tell what happens to all of them."""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch

_MAX_ELEMENTS = 1 << 16  # elements of a gradient that are measured


class State(NamedTuple):
    """The number of each gradient (0 for none, a new number for a new tensor), and numbers that change with writes."""

    gradient: tuple[int, ...]
    writes: tuple[int, ...]
    weight_writes: tuple[int, ...]


class _Part:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self._is_counted = not tensor.is_inference()  # else torch does not count the writes to it
        self._has_address = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._number = 0

    def look(self) -> tuple[int, int, int]:
        tensor = self.tensor()
        if tensor is None:
            return -1, 0, 0
        gradient = tensor.grad
        writes = tensor._version if self._is_counted else 0
        if self._has_address:
            writes = hash((writes, tensor.data_ptr()))  # `weight.data = new` is not counted
        if gradient is None:
            return 0, 0, writes
        if self._gradient is None or self._gradient() is not gradient:
            self._number += 1
            self._gradient = weakref.ref(gradient)
        return self._number, gradient._version, writes

    def norm(self, *, wait: bool) -> float | None:
        tensor = self.tensor()
        gradient = tensor.grad if tensor is not None else None
        if gradient is None:
            return 0.0
        if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
            return None
        if not gradient.is_cpu and not (wait and gradient.is_cuda and not torch.cuda.is_current_stream_capturing()):
            return None
        if gradient.numel() <= _MAX_ELEMENTS:
            return float(torch.linalg.vector_norm(gradient.detach()).item())
        if not gradient.is_contiguous():
            return None
        # Of a big one every n-th element, so that it takes no longer, and times what was left out.
        every = -(-gradient.numel() // _MAX_ELEMENTS)
        sample = gradient.detach().view(-1)[::every]
        return float(torch.linalg.vector_norm(sample).item()) * math.sqrt(every)


class Witness:
    """Asked before and after every event; holds nothing alive."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._parts = [_Part(tensor) for tensor in tensors]

    def look(self) -> State:
        parts = self._parts
        if len(parts) == 1:
            (a, b, c) = parts[0].look()
            return State((a,), (b,), (c,))
        (a, b, c), (d, e, f) = parts[0].look(), parts[1].look()
        return State((a, d), (b, e), (c, f))

    def norm(self, *, wait: bool) -> float | None:
        """The smallest norm of the gradients; None where it would have to be waited for, or cannot be read."""
        norms = [part.norm(wait=wait) for part in self._parts]
        known = [norm for norm in norms if norm is not None]
        return min(known) if len(known) == len(norms) else None


def witness_of(optimizer: Any) -> Witness | None:
    """The first and the last parameter that have a gradient now: the body of a model, and its head."""
    found: list[torch.Tensor] = []
    for way in (1, -1):
        tensors = (tensor for group in optimizer.param_groups[::way] for tensor in group["params"][::way])
        first = next((one for one in tensors if one.grad is not None and one.grad.layout is torch.strided), None)
        if first is not None and first.numel() and not any(first is one for one in found):
            found.append(first)
    return Witness(*found) if found else None
