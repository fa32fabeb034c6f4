"""Whether the loss and the gradients are finite, asked so that nothing waits and next to nothing is spent.

The loss is read when backward begins: at once on the CPU; on CUDA it is copied to pinned memory behind an event, and
looked at when the optimizer is about to step. Gradients are looked at there too, on the CPU all of them as long as that
stays within a small share of the run's time, else a rotating part.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

_SMALL_ROOT = 4096  # elements of a loss that is looked at whole
_ALLOWANCE = 0.05  # seconds that may be spent on gradients in any case
_SHARE = 0.01  # of the time since training began, beyond that


class FiniteWatch:
    """Notices the first step that is about to write NaN or infinity into the weights."""

    def __init__(self, alarm: Callable[[Any, FrameType, str], None]) -> None:
        self._alarm = alarm
        self.on = True
        self.roots: list[weakref.ref[torch.Tensor]] = []
        self.loss_values: list[float] = []
        self._suspect = False
        self._pending: list[tuple[torch.Tensor, Any]] = []
        self._unscaled: tuple[weakref.ref[torch.Tensor], bool] | None = None
        self._started = time.monotonic()
        self._spent = 0.0
        self._turn = 0

    # The loss

    def scaled(self, outputs: Any, result: Any) -> None:
        """GradScaler multiplied a loss: what counts is whether it was finite before."""
        if isinstance(outputs, torch.Tensor) and isinstance(result, torch.Tensor) and outputs.device.type == "cpu":
            self._unscaled = (weakref.ref(result), _is_bad(outputs))

    def backward_begins(self, roots: Sequence[torch.Tensor]) -> None:
        for root in roots:
            if not isinstance(root, torch.Tensor) or not root.is_floating_point() or root.numel() > _SMALL_ROOT:
                continue
            if root.device.type == "cpu":
                bad = _is_bad(root)
                if self._unscaled is not None and self._unscaled[0]() is root:
                    bad = self._unscaled[1]
                if bad:
                    self._suspect = True
                    self.loss_values.append(float(root.detach().reshape(-1)[0].item()))
            elif root.device.type == "cuda" and root.numel() == 1:
                self._copy_later(root)

    def _copy_later(self, root: torch.Tensor) -> None:
        host = torch.empty((), dtype=root.dtype, pin_memory=True)
        host.copy_(root.detach().reshape(()), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = [(host, event)]

    # The gradients

    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        """The weights are about to be touched: the last moment at which the step can be replayed as it was."""
        suspect, self._suspect = self._suspect, False
        for host, event in self._pending:
            event.synchronize()  # recorded before backward: what is waited for is long done
            suspect = suspect or not math.isfinite(float(host))
        self._pending = []
        gradients = [
            tensor.grad
            for group in optimizer.param_groups
            for tensor in group["params"]
            if tensor.grad is not None and tensor.grad.layout is torch.strided and tensor.grad.numel()
        ]
        if suspect:
            if any(_is_bad(gradient) for gradient in gradients):
                self._alarm(optimizer, frame, "loss")
            self.loss_values.clear()
        elif gradients and gradients[0].device.type == "cpu" and self._any_bad(gradients):
            self._alarm(optimizer, frame, "gradient")

    def _any_bad(self, gradients: list[torch.Tensor]) -> bool:
        started = time.perf_counter()
        limit = _ALLOWANCE + _SHARE * (time.monotonic() - self._started)
        bad = False
        # The first tensors of a model are the last that backward reaches: what is bad anywhere tends to arrive there.
        order = range(len(gradients)) if self._spent < limit else [0, self._turn % len(gradients)]
        self._turn += 1
        for index in order:
            if _is_bad(gradients[index]):
                bad = True
                break
        self._spent += time.perf_counter() - started
        return bad


def _is_bad(tensor: torch.Tensor) -> bool:
    tensor = tensor.detach()
    if tensor.numel() == 1:
        return not math.isfinite(tensor.item())
    # One reduction: a sum is finite only if every element is. An overflow of the sum itself is looked at again.
    if math.isfinite(tensor.sum().item()):
        return False
    return not bool(torch.isfinite(tensor).all().item())
