"""The training steps of a script: what is a parameter, a gradient or a state, and when to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchmedic.fit.fake_device import DEVICE
from torchmedic.fit.machine import Ended, Machine
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.replay.fake.changes import repeated_layers
from torchmedic.source.objects.living import live_modules

_MAX_STEPS = 12  # steps of all optimizers together, where some optimizer never steps twice


class Done(Ended):
    """Every optimizer has stepped twice."""


class Steps:
    """Counts the updates of the weights."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._counts: dict[int, int] = {}
        self._seconds = 0.0  # on the clock, when the last step ended
        self._update_began = 0.0
        self.made: dict[int, Any] = {}  # optimizers by identity

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Watch all optimizers until the end of the block."""
        handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        original = torch.optim.Optimizer.__init__

        def created(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.made[id(optimizer)] = optimizer
            self._machine.trace.optimizers.append((type(optimizer).__name__, self._machine.caller()))

        torch.optim.Optimizer.__init__ = created  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.made[id(optimizer)] = optimizer
        self._begin_update(optimizer)

        def outside(closure: Any) -> Any:
            """The closure of a step runs forward and backward, before the update."""

            def run() -> Any:
                self._machine.updating = False
                result = closure()
                self._begin_update(optimizer)
                return result

            return run

        # The first argument is the optimizer.
        words = {
            key: outside(value) if key == "closure" and value is not None else value for key, value in kwargs.items()
        }
        return (*args[:1], *(outside(each) if callable(each) else each for each in args[1:])), words

    def _begin_update(self, optimizer: Any) -> None:
        recorder = self._machine.recorder
        for tensor in parameters_of(optimizer):
            recorder.mark(tensor, "parameters")
            if tensor.grad is not None:
                recorder.mark(tensor.grad, "gradients")
        self._machine.updating = True
        self._update_began = self._machine.clock.seconds

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        machine = self._machine
        machine.updating = False
        machine.trace.update_seconds = machine.clock.seconds - self._update_began
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        machine.recorder.mark(tensor, "optimizer state")
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        machine.trace.steps += 1
        trained = [key for key, each in self.made.items() if parameters_of(each)]
        if all(self._counts.get(key, 0) >= 2 for key in trained) or machine.trace.steps >= _MAX_STEPS:
            machine.trace.seconds = machine.clock.seconds - self._seconds
            self.finish()
            machine.end(Done())
        if len(self._counts) == len(trained):
            self._seconds = machine.clock.seconds
            machine.trace.batch.clear()

    def finish(self) -> None:
        """Look at the modules that live at the end: what their buffers are, and which classes come several times."""
        modules = live_modules()
        self._machine.trace.classes = _repeated(modules)
        for module in modules:
            for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
                for tensor in tensors.values():
                    if tensor is not None and tensor.device == DEVICE:
                        self._machine.recorder.mark(tensor, kind)  # type: ignore[arg-type]


def _repeated(modules: list[Any]) -> dict[str, int]:
    """Bytes of the parameters of all layers of a class, for classes with several layers, none inside another."""
    layers = {id(child) for module in modules for child in module.children()}  # without whole models
    found: dict[str, int] = {}
    for group in repeated_layers(module for module in modules if id(module) in layers):
        parameters = {id(each): each.nbytes for module in group for each in module.parameters()}
        found[type(group[0]).__name__] = sum(parameters.values())
    return found
