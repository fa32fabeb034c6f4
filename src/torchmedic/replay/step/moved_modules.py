"""Modules that a library has moved away since the step, put back on their device for the time of a replay.

When an exception ends the training, Lightning moves the model to the CPU before anybody else sees the exception. Its
Trainer still knows the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


@contextlib.contextmanager
def put_back(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Parameters, gradients and buffers on the device of the step; on the CPU again afterwards.

    Where the device refuses them, they stay where they are.
    """
    moved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    try:
        with contextlib.suppress(RuntimeError, AssertionError):  # no memory, or a device that is lost
            for module in modules:
                _move(module, moved)
        yield
    finally:
        for tensor, data, grad in reversed(moved):
            _place(tensor, data, grad)


def _move(module: torch.nn.Module, moved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    device = device_of_trainer(module)
    if device is None or any(not tensor.is_cpu for tensor in tensors):
        return
    for tensor in tensors:
        data, grad = tensor.data, tensor.grad if tensor.is_leaf else None
        copies = data.to(device), grad.to(device) if grad is not None else None
        moved.append((tensor, data, grad))
        _place(tensor, *copies)


def _place(tensor: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    tensor.grad = None  # a gradient must be where its tensor is
    tensor.data = data
    tensor.grad = grad


def device_of_trainer(module: torch.nn.Module) -> torch.device | None:
    """The device that the Trainer of a LightningModule trains on, if that is not the CPU."""
    with contextlib.suppress(Exception):  # attributes of a Trainer that has been torn down
        device = module.__dict__["_trainer"].strategy.root_device
        return device if isinstance(device, torch.device) and device.type != "cpu" else None
    return None
