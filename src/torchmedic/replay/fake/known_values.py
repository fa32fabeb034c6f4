"""Values that a fake replay does know: small index tensors, on which a step branches (lengths, masks, counts).

Those in host memory are computed with for real. Of those on a device a copy in host memory goes along with the fake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MAX_ELEMENTS = 1 << 20
_HOST = "_torchmedic_host_value"
Exchange = Callable[[Any], Any]


def for_real(func: Any, args: Any, kwargs: Any) -> Any:
    guard = torch._C._DisableTorchDispatch()
    try:
        return func(*args, **kwargs)
    finally:
        del guard


def keeps_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation is computed for real: it reads nothing but small index tensors of the host."""
    tensors = tensors_of(args, kwargs)
    return (
        bool(tensors)
        and _is_harmless(func, kwargs)
        and all(_is_small_index(each) for each in tensors)
        and _stays_small(func, tensors)
    )


def host_result(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives where the values of all that it reads are known; None where they are not."""
    tensors = tensors_of(args, kwargs)
    if not tensors or func._schema.is_mutable or not all(_is_known(each) for each in tensors):
        return None
    if not _stays_small(func, tensors):
        return None
    here, options = exchanged(args, kwargs, _host_value)
    if "device" in options:
        options = {**options, "device": torch.device("cpu")}
    try:
        return for_real(func, here, options)
    except Exception:
        return None


def remember(result: Any, known: Any) -> None:
    """Let fakes carry the values that are known of them."""
    if known is None:
        return
    for fake, value in zip(tensors_of(result), tensors_of(known), strict=False):
        if isinstance(fake, FakeTensor) and _is_index(value):
            setattr(fake, _HOST, value)


def _stays_small(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether the result cannot be much larger than what is read, as that of all pairs would be."""
    alike = len({tuple(tensor.shape) for tensor in tensors}) == 1 and "repeat" not in func._schema.name
    return alike or math.prod(max(1, tensor.numel()) for tensor in tensors) <= _MAX_ELEMENTS


def _is_harmless(func: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    here = device is None or torch.device(device).type == "cpu"
    return here and not func._schema.is_mutable


def _is_index(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= _MAX_ELEMENTS


def _is_small_index(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.is_cpu and _is_index(tensor)


def _is_known(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, _HOST, None) is not None
    if not _is_index(tensor) or tensor.layout is not torch.strided:
        return False
    # A copy of what does not lie in one piece would take memory of the device.
    return tensor.device.type == "cpu" or (tensor.device.type == "cuda" and tensor.is_contiguous())


def _host_value(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return getattr(value, _HOST)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        guard = torch._C._DisableTorchDispatch()
        try:
            return value.detach().cpu()
        finally:
            del guard
    return value


def tensors_of(args: Any, kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """All tensors in the arguments of an operation, in order."""
    found: list[torch.Tensor] = []
    for value in (*_several(args), *(kwargs.values() if kwargs else ())):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found


def exchanged(args: Any, kwargs: Mapping[str, Any], exchange: Exchange) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with every value exchanged."""
    return tuple(_one(value, exchange) for value in args), {
        name: _one(value, exchange) for name, value in kwargs.items()
    }


def _one(value: Any, exchange: Exchange) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([exchange(each) for each in value]) if type(value) in (list, tuple) else value
    return exchange(value)


def _several(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)
