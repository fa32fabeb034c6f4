"""Modules of `fully_shard` without their other ranks, for a replay.

Each rank holds a part of every weight, and the hooks around `forward` gather the rest from the other ranks, which are
not in the replay. So the hooks are taken off, and whole weights stand in: the part of this rank, repeated. Shapes,
indices, writes in place and most bad numbers come from the code and the batch, and show with such weights as well; the
replayed loss is another one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchmedic.source.objects.finite import own_part

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_STAND_IN = 0.01  # for the values of a weight of which this rank has nothing


@contextlib.contextmanager
def unsharded(roots: Sequence[torch.nn.Module]) -> Iterator[bool]:
    """A context in which the modules below some roots run without other ranks. Yields whether weights stand in."""
    sharded = list(_sharded(roots))
    if not sharded:
        yield False
        return
    hooks = [(getattr(module, name), dict(getattr(module, name))) for module in sharded for name in _HOOKS]
    owners = {id(module): module for root in sharded for module in root.modules()}
    slots = [
        (module._parameters, name, weight)
        for module in owners.values()
        for name, weight in module._parameters.items()
        if weight is not None and _is_part(weight)
    ]
    whole: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
    try:
        for table, known in hooks:
            for key, hook in known.items():
                if _is_of_fsdp(hook):
                    del table[key]
        for table, name, weight in slots:
            if id(weight) not in whole:
                whole[id(weight)] = torch.nn.Parameter(_whole(weight), requires_grad=weight.requires_grad)
            table[name] = whole[id(weight)]
        yield True
    finally:
        for table, name, weight in slots:
            table[name] = weight
        for table, known in hooks:
            table.clear()
            table.update(known)


def _sharded(roots: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for module in {id(each): each for root in roots for each in root.modules()}.values():
        if isinstance(module, kind):
            yield module


def _is_part(weight: Any) -> bool:
    """Whether a weight is distributed along one dimension of ranks. Others need more than their parts to compute."""
    mesh = getattr(weight, "device_mesh", None)
    return mesh is not None and mesh.ndim == 1


def _is_of_fsdp(hook: Any) -> bool:
    owner = type(getattr(hook, "__self__", None)).__module__
    return "_fully_shard" in owner or "_fully_shard" in (getattr(hook, "__module__", None) or "")


def _whole(weight: Any) -> torch.Tensor:
    """A tensor of the full shape, made of the part that this rank has."""
    part = own_part(weight).detach()
    if part.shape == weight.shape:
        return part.clone()
    if part.numel() == 0:
        return torch.full(tuple(weight.shape), _STAND_IN, dtype=weight.dtype, device=part.device)
    times = [-(-full // own) for full, own in zip(weight.shape, part.shape, strict=True)]
    cut = tuple(slice(0, full) for full in weight.shape)
    return part.repeat(*times)[cut].clone()
