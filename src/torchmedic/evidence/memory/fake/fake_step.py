"""The failing step run once more on fake tensors: it needs no memory of the device, and next to none of the host."""

from __future__ import annotations

import ast
import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchmedic.evidence.memory.by_line import Line, summed
from torchmedic.evidence.memory.fake.ledger import ByteLedger, FailurePoint
from torchmedic.replay.isolation.alarm import Alarm
from torchmedic.replay.isolation.sandbox import GRACE, ReplayTooLong, ReplayWaits, harmless
from torchmedic.replay.isolation.torch_state import muted, replaced, same_modules, same_random_numbers, same_tensors
from torchmedic.replay.step.prepared_names import SegmentEnd
from torchmedic.replay.step.result import ReplayResult, start_of
from torchmedic.replay.step.reused_results import draws_from_iterator
from torchmedic.replay.step.runner import Runner
from torchmedic.replay.step.side_effects import no_side_effects
from torchmedic.replay.step.step import Step

_SECONDS = 6.0


class NotPlayed(Exception):
    """The step cannot be played on fakes."""

    def __init__(self, reason: str, *, is_long: bool = False) -> None:
        super().__init__(reason)
        self.is_long = is_long  # another try would take too long as well


@contextlib.contextmanager
def device_left_alone() -> Iterator[None]:
    """The first fake of a device allocates there, to have it started; here it is started, and full.

    A recurrent layer of cuDNN asks for the addresses of its weights, at which torch warns for fakes. The answer is not
    used, and a user who turns warnings into errors must not lose the prediction.
    """
    with contextlib.ExitStack() as stack:
        for name in ("init_gpu_context", "init_cuda_context"):
            if hasattr(fake_tensor, name):
                stack.enter_context(replaced(fake_tensor, name, lambda *args, **kwargs: None))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


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
            stack.enter_context(counted_by(ledger, fake, self.modules))
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


@contextlib.contextmanager
def counted_by(ledger: ByteLedger, fake: FakeTensorMode, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let a ledger count every operation. Only to be entered where `untouched` puts everything back.

    Recurrent layers on cuDNN look for the one memory that all their weights are in, beneath what a mode can see. So
    they get fakes that lead to their weights.
    """
    with torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack), fake, ledger:
        layers = (each for root in modules for each in root.modules() if isinstance(each, torch.nn.RNNBase))
        for layer in dict.fromkeys(layers):
            weights = layer.__dict__.get("_flat_weights") or ()
            if any(isinstance(each, torch.Tensor) and each.is_cuda for each in weights):
                layer.__dict__["_flat_weights"] = [
                    each.view_as(each) if isinstance(each, torch.Tensor) else each for each in weights
                ]
        ledger.begin()
        yield


@contextlib.contextmanager
def untouched(
    modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor], optimizers: Iterable[Any] = ()
) -> Iterator[None]:
    """Put back, without a copy of anything big, what a step changes on the Python side of modules and weights."""
    roots = list(modules)
    tensors = [*leaves, *(each for root in roots for each in [*root.parameters(), *root.buffers()])]
    with (
        same_random_numbers(on_device=False),
        same_tensors(tensors),
        _same_states(list(optimizers)),
        same_modules(roots),
    ):
        yield


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


def _put_back(state: Any, before: dict[Any, Any]) -> None:
    for key in [key for key in state if key not in before]:
        del state[key]
    for key, value in before.items():
        if isinstance(value, dict) and isinstance(state.get(key), dict):
            state[key].clear()
            state[key].update(value)
        else:
            state[key] = value


def play(
    step: Step, device: torch.device | None, *, stop: int | None, asked: int | None, line: tuple[str, int] | None
) -> tuple[ByteLedger, torch.device | None]:
    """Play the failed step on fake tensors; also returns the default device of new tensors, if that matters.

    Args:
        step: What failed.
        device: The one that has no memory. The step may have run under `with torch.device(...)`, which is over now.
        stop: After how many nodes it failed; None where that was in backward.
        asked: The bytes that it asked for.
        line: The user's file and line.

    Raises:
        NotPlayed: With the reason.
    """
    error: BaseException | None = None
    for default in (None, device):
        if error is not None and (default is None or not _is_mismatch(error)):
            break
        with default or contextlib.nullcontext():
            try:
                ledger, error = FakeRunner.of(step.runner).play_fake(stop=stop, asked=asked, line=line)
            except Exception as failure:
                error = failure
        if error is None:
            return ledger, default
    assert error is not None
    raise NotPlayed(_reason(error), is_long=isinstance(error, ReplayTooLong))


def made_again(step: Step, *, asked: int, line: tuple[str, int]) -> list[Line]:
    """What a step has made and still has when its backward, called at some line, asks for so much.

    For activations that a checkpoint computes again, which are gone once the exception has unwound.
    """
    try:
        ledger, error = FakeRunner.of(step.runner).play_fake(asked=asked, line=line, backward=True)
    except Exception:
        return []
    found = summed(ledger.at_failure) if error is None else []
    return [each for each in found if each.spot is not None and (each.spot.file, each.spot.line) != line]


def _is_mismatch(error: BaseException) -> bool:
    return "on the same device" in str(error) or "found two different devices" in str(error)  # torch 2.6


def _reason(error: BaseException) -> str:
    kind = type(error).__name__
    if "DataDependent" in kind or "DynamicOutputShape" in kind:
        return "the step reads values that fake tensors do not have"
    return f"{kind}: {str(error).splitlines()[0][:80]}" if str(error) else kind
