"""Copies of some elements of the weights, and how many of them updates have changed since."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from torchmedic.observe.device import async_devices

_MAX_TENSORS = 48  # of one optimizer
_MAX_ELEMENTS = 2048  # of one tensor
_TINY = 1e-38  # instead of 0: a NaN would be taken for a number that has not arrived
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Sample(NamedTuple):
    """Some elements of a weight, as they were at a look."""

    reference: weakref.ref[torch.Tensor]
    before: torch.Tensor
    every: int  # elements, of which one is looked at
    rate: float
    gradient: torch.Tensor  # the largest at that time, in one number


def samples_of(optimizer: Any, rates: list[float]) -> list[Sample]:
    """Copies of some elements of some weights, spread over all of them."""
    found: list[tuple[torch.Tensor, float]] = [
        (tensor, rate)
        for group, rate in zip(optimizer.param_groups, rates, strict=True)
        for tensor in group["params"]
        if rate > 0 and _is_readable(tensor) and _gradient(tensor) is not None
    ]
    # The steps of LBFGS are not of the size of its rate, and it stands still once it has come to its end.
    if isinstance(optimizer, torch.optim.LBFGS) or len({tensor.device for tensor, _ in found}) != 1:
        return []
    chosen = {round(place * (len(found) - 1) / max(1, _MAX_TENSORS - 1)) for place in range(_MAX_TENSORS)}
    samples = []
    for place in sorted(chosen):
        tensor, rate = found[place]
        every = -(-tensor.numel() // _MAX_ELEMENTS)
        gradient = _gradient(tensor)
        if gradient is not None:
            largest = gradient.view(-1)[::every].abs().amax().float()
            samples.append(Sample(weakref.ref(tensor), tensor.detach().view(-1)[::every].clone(), every, rate, largest))
    return samples


def _is_readable(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _PLAIN or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return False
    kind = tensor.device.type
    known = kind == "cpu" or kind in async_devices.devices
    late = async_devices.devices.get(kind)
    return known and tensor.is_floating_point() and tensor.is_contiguous() and (late is None or late.may_work())


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a tensor, if its elements can be picked like those of the tensor."""
    gradient = tensor.grad
    if gradient is None or type(gradient) not in _PLAIN or gradient.layout is not torch.strided:
        return None
    return gradient.detach() if gradient.is_contiguous() and gradient.device == tensor.device else None


def counts_of(sample: Sample) -> torch.Tensor | None:
    """Elements with a gradient, those that have changed, the largest gradient now and before, the largest change.

    The change is relative to the largest weight. The numbers stay on their device.
    """
    tensor = sample.reference()
    gradient = _gradient(tensor) if tensor is not None and _is_readable(tensor) else None
    if tensor is None or gradient is None:
        return None
    given = gradient.view(-1)[:: sample.every]
    now = tensor.detach().view(-1)[:: sample.every]
    if now.shape != sample.before.shape or now.dtype is not sample.before.dtype or now.device != sample.before.device:
        return None
    has_gradient = given != 0
    moved = (now != sample.before) & has_gradient
    largest = given.abs().amax().float()
    change = (now - sample.before).abs().amax().float() / sample.before.abs().amax().float().clamp_min(_TINY)
    return torch.stack([has_gradient.sum().float(), moved.sum().float(), largest, sample.gradient, change])
