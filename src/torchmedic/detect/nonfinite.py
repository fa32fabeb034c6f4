"""A loss or a gradient that is not finite, at the moment at which it would reach the weights -> the incident."""

from __future__ import annotations

from typing import Any

import msgspec
import torch


class TurnedBad(msgspec.Struct, frozen=True, kw_only=True):
    """The first step whose update would write NaN or infinity into the weights."""

    what: str  # "loss" or "gradient"
    step: int
    rank: int
    optimizer: Any
    bad: tuple[Any, ...]  # the parameters whose gradients are not finite
    damaged: tuple[Any, ...]  # the parameters that were not finite before this step
    batch_indices: tuple[Any, ...] = ()


def turned_bad(optimizer: Any, what: str, agent: Any) -> TurnedBad:
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    indices = agent.batches.indices
    return TurnedBad(
        what=what,
        step=agent.clock.step,
        rank=agent.rank,
        optimizer=optimizer,
        bad=tuple(tensor for tensor in parameters if tensor.grad is not None and not _finite(tensor.grad)),
        damaged=tuple(tensor for tensor in parameters if not _finite(tensor)),
        batch_indices=tuple(indices) if isinstance(indices, list | tuple) else () if indices is None else (indices,),
    )


def _finite(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.detach()).all().item())
