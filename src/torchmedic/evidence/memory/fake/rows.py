"""A batch with fewer rows: every tensor of it cut along its first dimension, without a copy."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchmedic.observe.step.batches import Given

_MAX_DEPTH = 3  # of containers in each other


class Rows(NamedTuple):
    """Keep so many rows of a batch of so many."""

    kept: int
    of: int


def rows_in(
    loaded: Sequence[torch.Tensor], items: Sequence[Any], given: Sequence[Given], modules: Iterable[torch.nn.Module]
) -> int | None:
    """How many rows the batch has, where that is clear; None where it is not.

    Args:
        loaded: The tensors that a loader yielded.
        items: The items of the data set that they were made of.
        given: What root modules were called with.
        modules: Those of the model.
    """
    leading = {len(tensor) for tensor in loaded if tensor.dim()}
    if loaded:
        if items:
            return len(items) if len(items) in leading and len(items) > 1 else None
        if len(leading) != 1:
            return None
    elif any(_is_time_major(module) for root in modules for module in root.modules()):
        return None  # the first dimension is probably not that of the batch
    called = given[-1].shape if given and not given[-1].nested else ()
    count = leading.pop() if leading else called[0] if len(called) > 1 else 0
    return count if count > 1 else None


def _is_time_major(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
    return isinstance(module, kinds) and not module.batch_first


def fewer(value: Any, rows: Rows, depth: int = _MAX_DEPTH) -> Any:
    """A value with fewer rows; the value itself where it does not have that number of rows."""
    if isinstance(value, torch.Tensor):
        return _cut(value, rows)
    if depth == 0 or isinstance(value, str | bytes | torch.nn.Module):
        return value
    if isinstance(value, list | tuple):
        if type(value) is list and len(value) == rows.of and isinstance(value[0], torch.Tensor | dict | str | int):
            return value[: rows.kept]  # one entry per row
        parts = [fewer(each, rows, depth - 1) for each in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if callable(getattr(type(value), "items", None)):
        return _mapping(value, rows, depth)
    return value


def _cut(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    if tensor.dim() == 0 or tensor.shape[0] != rows.of or tensor.layout is not torch.strided:
        return tensor
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        return tensor  # trained, or computed by the model
    part = tensor[: rows.kept]
    return part.clone() if isinstance(tensor, FakeTensor) else part


def _mapping(value: Any, rows: Rows, depth: int) -> Any:
    try:
        new = {key: fewer(each, rows, depth - 1) for key, each in itertools.islice(value.items(), 256)}
        if all(new[key] is each for key, each in value.items()):
            return value
        made = copy.copy(value)
        for key, each in new.items():
            made[key] = each
        return made
    except Exception:
        return value  # a mapping of its own kind, which cannot be copied so
