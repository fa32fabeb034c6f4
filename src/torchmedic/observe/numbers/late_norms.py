"""The gradient norm on a device that is read late: computed there at some updates, and read when it has arrived.

Nothing waits for the device. To compute a norm reads every gradient once, which is a small part of what the optimizer
reads and writes; so it is done at few updates, and within a budget of the host's time.
"""

from __future__ import annotations

from math import inf
from time import thread_time
from typing import Any, NamedTuple

import torch

from torchmedic.observe.budget import Account
from torchmedic.observe.device import async_devices
from torchmedic.observe.numbers.finite_checks import WITH_NORM, gradients, kind_of_device

_MIN_STRIDE = 8  # steps from one norm to the next


class _Coming(NamedTuple):
    """A norm that is being copied. The value on the device is kept until it has arrived."""

    step: int
    value: torch.Tensor


class LateNorms:
    """One norm at a time is on its way."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._due = 0.0  # the step from which on another one is wanted
        self._coming: _Coming | None = None
        self._places: dict[str, tuple[torch.Tensor, Any]] = {}  # by kind of device
        self._place: tuple[torch.Tensor, Any] | None = None  # that the norm under way is copied to

    def begin(self, step: int, optimizer: Any) -> None:
        """Have the norm of an optimizer's gradients computed, if it is time for one. The update is about to begin."""
        if step < self._due or self._coming is not None:
            return
        self._due = step + _MIN_STRIDE
        kind = kind_of_device(optimizer)
        device = async_devices.devices.get(kind)
        if device is None or not device.may_work():
            return
        if self._account.left <= 0:
            return
        started = thread_time()
        try:
            value = _norm(gradients(optimizer))
        except torch.OutOfMemoryError:
            value = None
        if value is None:
            self._due = inf
            return
        place = self._places.get(kind)
        if place is None:
            place = self._places[kind] = device.place(torch.float32)
        device.arrange(*place, value)
        self._place, self._coming = place, _Coming(step, value)
        self._account.spend(thread_time() - started)

    def arrived(self) -> tuple[int, float] | None:
        """The step and the norm that was begun in it, once, if it has arrived."""
        if self._coming is None or self._place is None or not self._place[1].query():
            return None
        step, self._coming = self._coming.step, None
        return step, float(self._place[0].item())


def _norm(found: list[torch.Tensor]) -> torch.Tensor | None:
    """The norm of all elements, on their device; None where they are of a kind whose norm would be something else."""
    if not found or len({tensor.device for tensor in found}) > 1:
        return None
    if not all(type(tensor) is torch.Tensor and tensor.dtype in WITH_NORM for tensor in found):
        return None
    with torch.no_grad():
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found, 2, torch.float32)))
    return norm
