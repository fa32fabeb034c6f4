"""The batch of an earlier step in place of the present one, wherever a variable or an object holds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.observe.step.tensors import tensors_in
from torchmedic.replay.isolation.torch_state import set_version

_Place = tuple[type, tuple[int, ...]]


@contextlib.contextmanager
def data_of(past: Any, present: Any) -> Iterator[None]:
    """A block in which the tensors of the present batch hold the data of another one."""
    with contextlib.ExitStack() as stack:
        for tensor, other in stand_ins(past, present):
            stack.callback(_put_back, tensor, tensor.data, tensor._version)
            tensor.data = other.data  # as a change of the data may set another one
        yield


def stand_ins(past: Any, present: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of the present batch that can hold the data of another one, and that data."""
    now, then = tensors_in(present), tensors_in(past)
    pairs = list(zip(now, then, strict=True)) if len(now) == len(then) else []
    return [(tensor, other) for tensor, other in pairs if _may_stand_for(tensor, other)]


def _may_stand_for(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    is_plain = type(tensor) is type(other) is torch.Tensor and not tensor.requires_grad and not tensor.is_inference()
    return (
        is_plain
        and tensor.layout is other.layout is torch.strided
        and (tensor.dtype, tensor.device) == (other.dtype, other.device)
    )


def _put_back(tensor: torch.Tensor, data: torch.Tensor, version: int) -> None:
    tensor.data = data
    set_version(tensor, version)


def place_of(value: Any) -> _Place:
    """What tells a part of a batch from others: its kind and its very tensors. A list may be another one by now."""
    return type(value), tuple(id(tensor) for tensor in tensors_in(value))


def may_be_part(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | tuple) or hasattr(type(value), "items")


def twins(present: Any, past: Any, depth: int = 4) -> Iterator[tuple[_Place, Any]]:
    """What stands at the same place in two batches."""
    if type(present) is not type(past) or not may_be_part(present):
        return  # numbers and texts are the same object wherever they are equal
    place = place_of(present)
    if place[1]:
        yield place, past
    if isinstance(present, torch.Tensor) or not depth:
        return
    if isinstance(present, list | tuple) and len(present) == len(past):
        for one, other in zip(present, past, strict=True):
            yield from twins(one, other, depth - 1)
    elif not isinstance(present, list | tuple):
        for name, one in present.items():
            if name in past:
                yield from twins(one, past[name], depth - 1)
