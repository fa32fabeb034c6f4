"""Whether values are finite: of one tensor, or of anything that a variable of the user may hold."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchmedic.contained import pass_signals_on

_MAX_ELEMENTS = 50_000_000  # elements of a tensor that is read for a question about a variable
_MAX_ITEMS = 64  # items of a container, from its beginning
_MAX_LAST = 8  # items from the end of a longer one
# These have no sum on the CPU.
_NARROW = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.complex32}
)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers in it. Tensors on `meta` and fake ones have a shape only."""
    if type(tensor) is torch.Tensor:
        return not tensor.is_meta
    return not tensor.is_meta and type(tensor).__name__ != "FakeTensor" and type(tensor.data).__name__ != "FakeTensor"


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that this process holds: of a `DTensor`, those of this rank.

    To compute with a `DTensor` itself may call a collective, which no other rank would answer.
    """
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the methods of its class: those of a class of the user's may do anything."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return own_part(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(tensor)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; True where there is nothing to read. Waits for its device."""
    tensor = plain(tensor)
    if tensor.layout is not torch.strided:
        if tensor.layout is not torch.sparse_coo:
            return True
        tensor = tensor._values()
    if not has_values(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype in _NARROW:
        tensor = tensor.to(torch.complex64)
    if tensor.numel() == 0:
        return True
    # One reduction: a sum is finite only if every element is. An overflow of the sum itself is looked at again.
    total = tensor.sum().item() if tensor.numel() != 1 else tensor.item()
    if math.isfinite(total if type(total) is float else abs(total)):
        return True
    return bool(torch.isfinite(tensor).all().item())


def is_bad(value: Any, depth: int = 2) -> bool:
    """Whether a number, a tensor of the host, an array or a container of these holds NaN or infinity."""
    try:
        if isinstance(value, bool | int | str | bytes) or value is None:
            return False
        if isinstance(value, float):
            return not math.isfinite(value)
        if isinstance(value, torch.Tensor):
            is_read = value.device.type == "cpu" and value.is_floating_point() and value.numel() <= _MAX_ELEMENTS
            return is_read and not is_finite(value)
        library = type(value).__module__.partition(".")[0]
        if library == "numpy" and getattr(value, "dtype", None) is not None:
            return _is_bad_array(value)
        if library == "pandas" and depth:
            if getattr(value, "ndim", 0) == 2:  # a missing text in a column of texts is no bad number
                return any(column.dtype.kind == "f" and _is_bad_array(column.to_numpy()) for _, column in value.items())
            return _is_bad_array(value.to_numpy())
        if depth and isinstance(value, list | tuple):
            return any(is_bad(part, depth - 1) for part in _ends(value))
        if depth and isinstance(value, dict):
            return any(is_bad(part, depth - 1) for part in _ends(list(value.values())))
    except Exception as error:  # whatever an object of the user does when it is looked at
        pass_signals_on(error)
        return False
    return False


def _is_bad_array(array: Any) -> bool:
    """Whether an array of NumPy's holds NaN or infinity. A table's row of several types is an array of objects."""
    import numpy

    if array.dtype.kind == "O" and array.size <= _MAX_ITEMS:
        return any(isinstance(item, float) and not math.isfinite(item) for item in array.flat)
    return array.dtype.kind == "f" and not bool(numpy.isfinite(array).all())


def _ends(items: list[Any] | tuple[Any, ...]) -> list[Any]:
    """The first items of a container, and those that were put into it last."""
    return list(items) if len(items) <= _MAX_ITEMS else [*items[:_MAX_ITEMS], *items[-_MAX_LAST:]]
