"""What variables held, kept so that a replay can go back to a step later."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from torchmedic.observe.numbers.func_losses import is_trained
from torchmedic.observe.step.tensors import PLAIN, is_array

_MAX_HELD_BYTES = 1 << 18  # of a tensor on a device that is held
_MAX_HELD_HOST_BYTES = 1 << 16  # of one in host memory: larger ones, held one by one, would fragment the heap


class Kept(NamedTuple):
    """A tensor and its version: a later write to it makes it another one."""

    tensor: weakref.ref[torch.Tensor]
    alias: torch.Tensor | None  # shares the memory and the version; the user's own tensor lives no longer for it
    version: int


GONE = object()


def kept(value: Any, depth: int = 2) -> Any:
    """A value to go back to a step later; what would keep a graph or much memory alive is not kept."""
    kind = type(value)  # `__class__` may be the user's code
    if value is None or issubclass(kind, int | float | str):
        return value
    if issubclass(kind, torch.Tensor):
        if kind not in PLAIN:
            return value if issubclass(kind, torch.nn.Parameter) else GONE
        if value.requires_grad or value.is_inference() or is_trained(value):
            return value if kind is torch.nn.Parameter and value.is_leaf else GONE
        limit = _MAX_HELD_HOST_BYTES if value.is_cpu else _MAX_HELD_BYTES
        big = value.nbytes > limit if value.layout is torch.strided else True
        return Kept(weakref.ref(value), None if big else value.detach(), value._version)
    if is_array(kind):
        if value.nbytes > _MAX_HELD_HOST_BYTES or value.dtype.hasobject:
            return GONE
        # A copy: an array has no version that tells of a later write, and while it is held it cannot be resized.
        return value.copy()
    if depth:
        if _is_sequence(kind) and len(value) <= 16:
            return getattr(kind, "_make", kind)([kept(item, depth - 1) for item in value])
        if kind is dict and len(value) <= 32:
            return {name: kept(item, depth - 1) for name, item in value.items()}
    return GONE


def given_back(value: Any) -> Any:
    """What `kept` kept; GONE where some of it is not there any more or has been written to."""
    if isinstance(value, Kept):
        own = value.tensor()
        tensor = own if own is not None else value.alias
        return tensor if tensor is not None and tensor._version == value.version else GONE
    kind = type(value)
    if kind is dict or _is_sequence(kind):
        items = [given_back(item) for item in (value.values() if kind is dict else value)]
        given = dict(zip(value, items, strict=True)) if kind is dict else getattr(kind, "_make", kind)(items)
        return GONE if any(item is GONE for item in items) else given
    return value


def _is_sequence(kind: type) -> bool:
    """Whether it is a list, a tuple or a named tuple: nothing else is made by `_make` from its items."""
    return kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_make"))
