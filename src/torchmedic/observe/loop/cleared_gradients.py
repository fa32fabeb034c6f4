"""How large the gradients are that a loop clears before an update could use them, against those that it uses.

Only loops that clear after backward and before the update come here, and only a few cycles of them are measured. The
norms stay on the device until somebody asks.
"""

from __future__ import annotations

from typing import Any

import torch

_MAX_CYCLES = 3
_MAX_ELEMENTS = 1 << 22  # that are copied
_MAX_COPIES = 48


class ThrownAway:
    """The gradients of one optimizer that were cleared before it used them."""

    def __init__(self) -> None:
        self._backwards = 0
        self._sums: list[torch.Tensor] = []
        self._cycles = 0
        self._copies = 0
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None

    def backward(self) -> None:
        self._backwards += 1

    def clearing(self, optimizer: Any) -> None:
        """Gradients are about to be cleared."""
        if not self._backwards or self._cycles >= _MAX_CYCLES or self._copies >= _MAX_COPIES:
            return
        gradients = _gradients(optimizer)
        self._backwards = 0
        if not gradients:
            return
        self._copies += 1
        if self._sums:
            self._sums = [a + b for a, b in zip(self._sums, gradients, strict=False)]
        else:
            self._sums = [gradient.clone() for gradient in gradients]

    def step(self, optimizer: Any) -> None:
        """An update begins with what is left."""
        self._backwards = 0
        gradients, lost = _gradients(optimizer) if self._sums else [], self._sums
        self._sums = []
        if lost and len(lost) == len(gradients):
            self._cycles += 1
            whole = [a + b for a, b in zip(lost, gradients, strict=True)]
            self._norms = (_norm(gradients), _norm(whole))

    def norms(self) -> tuple[float, float] | None:
        """Norms of the gradients that the last update used, and of all that there were; waits for the device."""
        return None if self._norms is None else (float(self._norms[0].item()), float(self._norms[1].item()))


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    """All gradients, or none where they are too large to be copied or are not plain tensors."""
    found = [
        tensor.grad.detach()
        for group in optimizer.param_groups
        for tensor in group["params"]
        if tensor.grad is not None
    ]
    is_plain = all(type(gradient) is torch.Tensor and gradient.layout is torch.strided for gradient in found)
    if any(gradient.is_cuda for gradient in found) and torch.cuda.is_current_stream_capturing():
        return []  # copies would become part of the user's graph
    return found if is_plain and sum(gradient.numel() for gradient in found) <= _MAX_ELEMENTS else []


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    where = tensors[0].device
    norms = [torch.linalg.vector_norm(tensor).to(where, torch.float32) for tensor in tensors]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
