"""The tensors inside of a batch, of arguments, of variables, of optimizers."""

from __future__ import annotations

from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from torchmedic.contained import pass_signals_on

_MAX_FRAMES = 80
_MAX_ENTRIES = 100_000  # entries of a state that are counted
PLAIN = (torch.Tensor, torch.nn.Parameter)  # to ask any other class of tensors may run code of the user's
_SEQUENCES = (list, tuple)  # to build `list | tuple` at every call takes longer than the call


def is_mapping(value: Any) -> bool:
    """By its class alone: to ask the object itself may run a `__getattr__` of the user's, which may be what failed."""
    return isinstance(value, dict) or callable(getattr(type(value), "items", None))


def is_array(kind: type) -> bool:
    """Whether it is the class of a NumPy array or number. Images have only the interface of one."""
    return getattr(kind, "__module__", None) == "numpy" and hasattr(kind, "__array_interface__")


def tensors_in(value: Any, depth: int = 4) -> list[torch.Tensor]:
    """Every tensor of a nested batch, in order."""
    kind = type(value)
    if kind is not list and kind is not tuple:  # nearly always it is one of them
        if isinstance(value, torch.Tensor):
            return [value]
        if depth and is_mapping(value):
            try:
                value = list(value.values())
            except Exception as error:
                pass_signals_on(error)
                return []
    if depth and isinstance(value, _SEQUENCES):
        found: list[torch.Tensor] = []
        for item in value[:256]:
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                found += tensors_in(item, depth - 1)
        return found
    return []


def tensors_in_frames(frame: FrameType | None) -> list[torch.Tensor]:
    """The tensors that the variables of a frame and of its callers hold."""
    found: list[torch.Tensor] = []
    for each, _ in islice(walk_stack(frame), _MAX_FRAMES) if frame is not None else ():
        for value in list(each.f_locals.values()):
            if isinstance(value, torch.Tensor | list | tuple) or is_mapping(value):
                found += tensors_in(value, 3)
    return found


def parameters_of(*optimizers: Any) -> list[torch.Tensor]:
    """The tensors that optimizers update, in order."""
    return [tensor for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]]


def bytes_in(state: Any) -> int:
    """The bytes of the tensors in nested containers, each storage once. No code of the user's is run."""
    storages: dict[int, int] = {}
    waiting, seen = [state], 0
    while waiting and seen < _MAX_ENTRIES:
        value = waiting.pop()
        seen += 1
        if isinstance(value, torch.Tensor):
            _count_storage(value, storages)
        elif isinstance(value, dict):
            waiting.extend(dict.values(value))
        elif isinstance(value, list | tuple):
            waiting.extend(value[:_MAX_ENTRIES])
        elif isinstance(value, torch.nn.Module):
            waiting.extend(value.__dict__.get(group) for group in ("_parameters", "_buffers", "_modules"))
    return sum(storages.values())


def _count_storage(tensor: torch.Tensor, storages: dict[int, int]) -> None:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        storages[int(storage._cdata)] = storage.nbytes()
