"""Modules, loaders and scalers on fake tensors: parameters are fake from birth and stay the same objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from torchmedic.fit.changes import Change
from torchmedic.fit.fake_device import DEVICE
from torchmedic.fit.machine import Machine
from torchmedic.replay.shadow.fake_cuda import replaced


@contextlib.contextmanager
def faked_modules(machine: Machine, change: Change) -> Iterator[None]:
    """Make parameters fake, and DataLoaders work in this process, until the end of the block."""
    answers = (
        (torch.nn.Parameter, "__new__", staticmethod(_parameter(machine))),
        (torch.nn.Module, "_apply", _moved(machine)),
        (DataLoader, "__init__", _loader(machine, change)),
        (torch.nn.DataParallel, "forward", lambda self, *args, **kwargs: self.module(*args, **kwargs)),
        (torch.amp.GradScaler, "_maybe_opt_step", _always_steps),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(replaced(owner, name, value))
        yield


def _parameter(machine: Machine) -> Any:
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0)
        if not isinstance(data, FakeTensor) and data.device.type in ("cpu", "cuda"):
            data = machine.fake_like(data.detach(), DEVICE if machine.adopt else None)
            if machine.adopt:
                machine.recorder.born(data, "parameters", machine.caller(), machine.caller())
        return original(cls, data, requires_grad)

    return new


def _moved(machine: Machine) -> Any:
    """`Module._apply`, which converts and moves parameters: a fake parameter stays the same object."""

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():
                child._apply(fn)
        with machine.moving():
            for name, parameter in list(self._parameters.items()):
                if parameter is None:
                    continue
                with torch.no_grad():
                    made = fn(parameter)
                if made is not parameter:
                    self._parameters[name] = _with_content(parameter, made)
            for name, buffer in list(self._buffers.items()):
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        return self

    return _apply


def _with_content(parameter: Any, made: Any) -> Any:
    if not isinstance(parameter, FakeTensor) or not isinstance(made, FakeTensor):
        return torch.nn.Parameter(made, parameter.requires_grad)
    gradient, parameter.grad = parameter.grad, None
    parameter.data = made
    parameter.fake_device = made.fake_device
    if gradient is not None:
        parameter.grad = gradient.to(device=made.fake_device, dtype=made.dtype)
    return parameter


def _loader(machine: Machine, change: Change) -> Any:
    original: Any = DataLoader.__init__

    def created(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"num_workers": 0, "pin_memory": False, "timeout": 0}
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "worker_init_fn"):
            kwargs.pop(name, None)
        if batch_size is not None and batch_size > 1:
            machine.trace.loader_sizes.append(batch_size)
            if change.loader is not None and batch_size == change.loader_was:
                batch_size = change.loader
        original(self, dataset, batch_size, *args, **kwargs)

    return created


def _always_steps(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
    """`GradScaler` skips an update if it finds an infinite gradient, which a fake cannot tell."""
    return optimizer.step(*args, **kwargs)
