"""The failing step run once more on fake tensors: it needs no memory of the device, and next to none of the host."""

from __future__ import annotations

import ast
import contextlib
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchmedic.evidence.memory.fake.ledger import ByteLedger, FailurePoint
from torchmedic.replay.isolation.alarm import Alarm
from torchmedic.replay.isolation.sandbox import GRACE, ReplayTooLong, ReplayWaits, harmless
from torchmedic.replay.isolation.torch_state import muted, set_version
from torchmedic.replay.step.result import ReplayResult, start_of
from torchmedic.replay.step.reused_results import draws_from_iterator
from torchmedic.replay.step.runner import Runner, SegmentEnd
from torchmedic.replay.step.side_effects import no_side_effects

_SECONDS = 6.0


@contextlib.contextmanager
def device_left_alone() -> Iterator[None]:
    """The first fake of a device allocates there, to have it started; here it is started, and full.

    A recurrent layer of cuDNN asks for the addresses of its weights, at which torch warns for fakes. The answer is not
    used, and a user who turns warnings into errors must not lose the prediction.
    """
    names = [name for name in ("init_gpu_context", "init_cuda_context") if hasattr(fake_tensor, name)]
    before = {name: getattr(fake_tensor, name) for name in names}
    try:
        for name in before:
            setattr(fake_tensor, name, lambda *args, **kwargs: None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        for name, function in before.items():
            setattr(fake_tensor, name, function)


class FakeRunner(Runner):
    """Plays a segment on fakes. Weights, buffers, gradients and random states stay as they are."""

    @classmethod
    def of(cls, runner: Runner) -> FakeRunner:
        made = cls.__new__(cls)
        made.__dict__.update(runner.__dict__)
        return made

    def names(self) -> dict[int, str]:
        """The paths of all modules in reach, by identity."""
        found: dict[int, str] = {}
        for root in sorted(self.modules, key=lambda each: -sum(1 for _ in each.modules())):
            for path, module in root.named_modules():
                found.setdefault(id(module), path or type(root).__name__)
        return found

    def play_fake(
        self,
        *,
        stop: int | None = None,
        asked: int | None = None,
        line: tuple[str, int] | None = None,
        backward: bool = False,
    ) -> tuple[ByteLedger, BaseException | None]:
        """Run the step and count.

        Returns:
            What was counted, and what ended the replay before its time: fakes have no values to branch on.
        """
        # An operation without a fake must not be run on the device in its stead.
        fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        ledger = ByteLedger(fake, self.names(), time.monotonic() + _SECONDS, stop=stop, asked=asked, line=line)
        namespace = self._namespace()
        error: BaseException | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(muted())
            stack.enter_context(harmless(self._frame))
            stack.enter_context(untouched(self.modules, [*self.parameters, *self.loose_leaves], self._optimizers))
            stack.enter_context(device_left_alone())
            stack.enter_context(
                no_side_effects(ReplayResult(), self._optimizers, self._batch, backward=backward, keep_graphs=False)
            )
            stack.enter_context(torch.set_grad_enabled(self._notes.grad_enabled))
            for device, dtype in self._notes.autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack))
            stack.enter_context(fake)
            stack.enter_context(ledger)
            fake_recurrent_weights(ledger, self.modules)
            try:
                with Alarm(time.monotonic() + _SECONDS + GRACE, ReplayTooLong, ReplayWaits):
                    self._execute_fake(namespace)
            except (SegmentEnd, FailurePoint):
                pass
            except Exception as failure:
                error = failure
                if ledger.failing is not None:
                    error = None
        return ledger, error

    def _execute_fake(self, namespace: dict[str, Any], after: Callable[[ast.stmt], None] | None = None) -> None:
        for statement, code in self.segment.code():
            if start_of(statement) in self.frozen or draws_from_iterator(statement, namespace):
                continue
            if not self._run_statement(statement, code, namespace):
                continue
            if after is not None:
                after(statement)


def fake_recurrent_weights(ledger: ByteLedger, modules: Iterable[torch.nn.Module]) -> None:
    """Recurrent layers on cuDNN look for the one memory that all their weights are in, beneath what a mode can see.

    So they get fakes that lead to their weights. Only to be called where `untouched` puts everything back.
    """
    layers = {id(layer): layer for root in modules for layer in root.modules() if isinstance(layer, torch.nn.RNNBase)}
    for layer in layers.values():
        weights = layer.__dict__.get("_flat_weights") or ()
        if any(isinstance(each, torch.Tensor) and each.is_cuda for each in weights):
            layer.__dict__["_flat_weights"] = [
                each.view_as(each) if isinstance(each, torch.Tensor) else each for each in weights
            ]
    ledger.begin()


@contextlib.contextmanager
def untouched(
    modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor], optimizers: Iterable[Any] = ()
) -> Iterator[None]:
    """Put back, without a copy of anything big, what a step changes on the Python side of modules and weights."""
    roots = list(modules)
    tensors = {id(each): each for each in leaves}
    tensors |= {id(each): each for root in roots for each in [*root.parameters(), *root.buffers()]}
    with (
        _same_random_numbers(),
        _same_tensors(list(tensors.values())),
        _same_states(list(optimizers)),
        _same_modules(roots),
    ):
        yield


@contextlib.contextmanager
def _same_tensors(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Put back which gradients tensors have, and their versions."""
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    try:
        yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for tensor, version in versions:
            if tensor._version != version:
                set_version(tensor, version)


@contextlib.contextmanager
def _same_modules(roots: list[torch.nn.Module]) -> Iterator[None]:
    """Put back the attributes, parameters and buffers of modules."""
    children = list({id(child): child for root in roots for child in root.modules()}.values())
    plain = [(child, dict(child.__dict__)) for child in children]
    parts = [(child, name, dict(child.__dict__[name])) for child in children for name in ("_parameters", "_buffers")]
    try:
        yield
    finally:
        for child, attributes in plain:
            child.__dict__.clear()
            child.__dict__.update(attributes)
        for child, name, content in parts:
            child.__dict__[name].update(content)


@contextlib.contextmanager
def _same_states(optimizers: list[Any]) -> Iterator[None]:
    """Put back the state of optimizers: the same dictionaries with what they held."""
    states = [
        (optimizer, {key: dict(value) if isinstance(value, dict) else value for key, value in optimizer.state.items()})
        for optimizer in optimizers
    ]
    try:
        yield
    finally:
        for optimizer, state in states:
            _put_back(optimizer.state, state)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Put back the random numbers of Python, NumPy and torch on the host."""
    numpy = sys.modules.get("numpy")
    states = (random.getstate(), numpy.random.get_state() if numpy is not None else None, torch.get_rng_state())
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None and states[1] is not None:
            numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _put_back(state: Any, before: dict[Any, Any]) -> None:
    for key in [key for key in state if key not in before]:
        del state[key]
    for key, value in before.items():
        if isinstance(value, dict) and isinstance(state.get(key), dict):
            state[key].clear()
            state[key].update(value)
        else:
            state[key] = value
