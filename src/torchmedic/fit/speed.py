"""How long operations take on a card, by a roofline: the slower of arithmetic and memory traffic, plus a launch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from torchmedic.fit.cards import Card

_LAUNCH_SECONDS = 4e-6  # seconds that a kernel takes which has nearly nothing to do
_EFFICIENCY = 0.6  # share of the data sheet that real kernels reach
_COPY = torch.ops.aten._to_copy.default


class Clock:
    """Adds up the estimated time of operations on the device."""

    def __init__(self, card: Card) -> None:
        self.seconds = 0.0
        self._card = card
        self._of = dict(flop_registry)

    def ran(self, func: Any, args: Any, made: list[Any], tensors: list[torch.Tensor]) -> None:
        """Add one operation."""
        read = sum(each.nbytes for each in tensors if each.device.type == "cuda")
        if not made and func is _COPY:  # to the host
            self.seconds += read / self._card.host_bandwidth
            return
        if not made and not func._schema.is_mutable:
            return
        written = sum(each.nbytes for each in made) or read
        if _is_view(func):
            return
        if any(each.device.type == "cpu" and each.dim() for each in tensors) and made:
            self.seconds += written / self._card.host_bandwidth
            return
        traffic = (read + written) / (self._card.bandwidth * _EFFICIENCY)
        self.seconds += max(traffic, self._arithmetic(func, args, made), _LAUNCH_SECONDS)

    def _arithmetic(self, func: Any, args: Any, made: list[Any]) -> float:
        count = self._of.get(func.overloadpacket) or self._of.get(func)
        if count is None:
            return 0.0
        try:
            flops = count(*args, out_val=made[0] if len(made) == 1 else tuple(made))
        except Exception:
            flops = 2 * sum(math.prod(each.shape) for each in made)
        dtypes = {each.dtype for each in made}
        is_half = bool(dtypes & {torch.bfloat16, torch.float16})
        return float(flops) / ((self._card.half_flops if is_half else self._card.float_flops) * _EFFICIENCY)


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.arguments)
