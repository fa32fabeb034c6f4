"""The slope of an operation at the values that it was given, computed once more in double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchmedic.replay.trace.microscope import Captured


def singular(values: Captured) -> tuple[int, torch.Tensor] | None:
    """Which argument of an operation is at points where the result is finite and the slope is not, and where."""
    try:
        given, result = _again(values)
        outputs = [tensor for tensor in _tensors(result) if tensor.is_floating_point() and tensor.requires_grad]
        if not outputs or not all(bool(torch.isfinite(tensor).all()) for tensor in outputs):
            return None
        total = torch.stack([tensor.sum() for tensor in outputs]).sum()
        leaves = [tensor for tensor in given if tensor.requires_grad]
        slopes = torch.autograd.grad(total, leaves, allow_unused=True)
    except Exception:  # an operation that double precision, or autograd, does not know
        return None
    for tensor, slope in zip(leaves, slopes, strict=True):
        if slope is not None and not bool(torch.isfinite(slope).all()):
            position = next(number for number, other in enumerate(given) if other is tensor)
            return position, ~torch.isfinite(slope)
    return None


def in_float32(values: Captured) -> list[torch.Tensor] | None:
    """What the operation gives for the same numbers in single precision."""
    try:
        with torch.no_grad():
            result = _run(values, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    except Exception:
        return None
    return _tensors(result)


def in_double(values: Captured) -> list[torch.Tensor] | None:
    """What the operation gives for the same numbers in double precision."""
    try:
        with torch.no_grad():
            result = _run(values, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    except Exception:
        return None
    return [tensor for tensor in _tensors(result) if tensor.is_floating_point()]


def _again(values: Captured) -> tuple[list[torch.Tensor], Any]:
    given: list[torch.Tensor] = []

    def prepare(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            tensor = tensor.detach().double().requires_grad_()
        given.append(tensor)
        return tensor

    with torch.enable_grad():
        return given, _run(values, prepare)


def _run(values: Captured, change: Any) -> Any:
    def changed(part: Any) -> Any:
        return change(part) if isinstance(part, torch.Tensor) else part

    # In-place variants and a dtype that was asked for would undo the change.
    func = values.func
    name = func._schema.name.split("::")[-1]
    args, kwargs = tree_map(changed, (values.args, values.kwargs))
    kwargs = {key: part for key, part in kwargs.items() if key not in ("dtype", "out")}
    if func._schema.is_mutable and name.endswith("_"):
        return getattr(torch.Tensor, name[:-1])(*args, **kwargs)
    return func(*args, **kwargs)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [part for part in result if isinstance(part, torch.Tensor)] if isinstance(result, tuple | list) else []
