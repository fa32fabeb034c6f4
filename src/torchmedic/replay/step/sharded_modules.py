"""Modules of `fully_shard` and FullyShardedDataParallel without their other ranks, for a replay.

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
    with _without_shards(roots) as one, _without_flat_weights(roots) as other:
        yield one or other


@contextlib.contextmanager
def _without_shards(roots: Sequence[torch.nn.Module]) -> Iterator[bool]:
    """`fully_shard`: the hooks around `forward` are taken off, and every weight is replaced by a whole one."""
    sharded = list(_modules(roots, "FSDPModule"))
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


@contextlib.contextmanager
def _without_flat_weights(roots: Sequence[torch.nn.Module]) -> Iterator[bool]:
    """FullyShardedDataParallel: `forward` calls the module inside, whose weights are cut out of a whole flat one."""
    wrappers = list(_modules(roots, "FullyShardedDataParallel"))
    if not wrappers:
        yield False
        return
    kind: Any = type(wrappers[0])
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
    forward = kind.forward
    try:
        for wrapper in wrappers:
            for owner, name, weight in _cut_out(wrapper):
                tables += [(owner.__dict__, dict(owner.__dict__)), (owner._parameters, dict(owner._parameters))]
                owner.__dict__.pop(name, None)  # between two steps a weight may be a plain attribute
                owner._parameters[name] = weight
        kind.forward = lambda wrapper, *args, **kwargs: wrapper.module(*args, **kwargs)
        yield True
    finally:
        kind.forward = forward
        for table, before in reversed(tables):
            table.clear()
            table.update(before)


def _cut_out(wrapper: Any) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """The weights of a wrapper that stand in: their module, their name there, and a tensor of the full shape."""
    flat = getattr(getattr(wrapper, "_handle", None), "flat_param", None)
    if flat is None:
        return
    part = getattr(flat, "_local_shard", flat).detach().flatten()
    total = sum(flat._numels)
    whole = part.repeat(-(-total // part.numel()))[:total] if part.numel() else part.new_full((total,), _STAND_IN)
    made: dict[tuple[int, str], torch.nn.Parameter] = {}
    for info, shape, piece in zip(flat._param_infos, flat._shapes, whole.split(list(flat._numels)), strict=True):
        weight = torch.nn.Parameter(piece.view(shape).clone(), requires_grad=flat.requires_grad)
        made[id(info.module), info.param_name] = weight
        yield info.module, info.param_name, weight
    for info in flat._shared_param_infos:  # tied weights stay tied
        yield info.module, info.param_name, made[id(info.prim_module), info.prim_param_name]


def _modules(roots: Sequence[torch.nn.Module], name: str) -> Iterator[torch.nn.Module]:
    """The modules below some roots that are of a class of torch.distributed.fsdp."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
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
