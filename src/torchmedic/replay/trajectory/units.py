"""The backward calls that are run again, the ways to repeat one of them, and what is set up around its replay."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from torchmedic.observe.context import StepContext
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.replay.isolation.torch_state import replaced
from torchmedic.replay.step.earlier_step import EarlierStepRunner, earlier_step
from torchmedic.replay.step.prepared_names import SegmentEnd
from torchmedic.replay.step.step import Step
from torchmedic.replay.trajectory.change import Gradients


class Unit(NamedTuple):
    """A backward call that is run again."""

    call: KeptBackward
    step: Step
    is_update: bool
    before: tuple[KeptBackward, ...]  # the calls since the last update: of an accumulation, or inside of the step
    times: int = 1  # that the call counts for, where the others before the update cannot be run again

    @property
    def batches(self) -> int:
        """How many backward calls belong to the update."""
        return self.times * (len(self.before) + 1)


def units_of(
    calls: list[KeptBackward], frame: FrameType | None, agent: StepContext, max_updates: int
) -> Iterator[Unit]:
    """The calls that end in an update, and the last one in any case."""
    pending: list[KeptBackward] = []
    updates = 0
    inner = inner_places(calls)
    for call in calls:
        is_last = call is calls[-1]
        if not call.ends and not is_last and (not call.by_hand or place_of(call) in inner):
            pending.append(call)
            continue
        is_update = (bool(call.ends) and not call.is_repeated) or (call.by_hand and not is_last)
        step, _ = earlier_step(call, frame, agent, to_update=is_update)
        yield Unit(call, step, is_update, tuple(pending))
        pending = []
        updates += is_update
        if updates >= max_updates:
            return


def inner_places(calls: list[KeptBackward]) -> set[tuple[int, int]]:
    """The calls of loops without an optimizer that no update follows: the inner gradients of meta-learning.

    After such a call another line differentiates the same weights.
    """
    found = set()
    for call, following in itertools.pairwise(calls):
        if call.by_hand and place_of(call) != place_of(following) and _trains_same(call, following):
            found.add(place_of(call))
    return found


def _trains_same(call: KeptBackward, other: KeptBackward) -> bool:
    def state(each: KeptBackward) -> list[tuple[int, int]]:
        return [(leaf.alias.data_ptr() if leaf.alias is not None else 0, leaf.version) for leaf in each.leaves]

    return bool(call.leaves) and state(call) == state(other)


def place_of(call: KeptBackward) -> tuple[int, int]:
    return (id(call.points[0].code), call.points[0].lasti) if call.points else (0, 0)


def plainly(unit: Unit, previous: Unit | None) -> bool:
    return True


def with_state_of_forward(unit: Unit, previous: Unit | None) -> bool:
    """Draw the random numbers of the forward pass from its own state: of the first step only this one is known."""
    runner = unit.step.runner
    if unit.call.forward_rng is None or not isinstance(runner, EarlierStepRunner):
        return False
    runner.takes_state_of_forward = True
    return True


def taking_over_data(unit: Unit, previous: Unit | None) -> bool:
    """Do not make the data again: random numbers may come from anywhere."""
    runner = unit.step.runner
    return isinstance(runner, EarlierStepRunner) and runner.freeze_data()


def with_state_of_previous(unit: Unit, previous: Unit | None) -> bool:
    """Draw the random numbers of the update before: both are in one turn of a loop, as of a GAN."""
    unit.step.runner.frozen = set()
    if previous is None or previous.call.step != unit.call.step:
        return False
    unit.call.rng, unit.call.device_marks = previous.call.rng, previous.call.device_marks
    return True


def with_state_of_first_call(unit: Unit, previous: Unit | None) -> bool:
    """Draw the random numbers of the first call since the last update: the turn of the loop began before that one."""
    unit.step.runner.frozen = set()
    if not unit.before:
        return False
    unit.call.rng, unit.call.device_marks = unit.before[0].rng, unit.before[0].device_marks
    return True


Way = Callable[[Unit, Unit | None], bool]  # sets a step up; False where it cannot be repeated in this way
WAYS: tuple[Way, ...] = (
    plainly,
    with_state_of_forward,
    taking_over_data,
    with_state_of_first_call,
    with_state_of_previous,
)


@contextlib.contextmanager
def unscaled() -> Iterator[None]:
    """Leave the factor of a GradScaler out: the recorded updates used unscaled gradients."""
    with replaced(GradScaler, "scale", lambda scaler, outputs: outputs):
        yield


def stepping(unit: Unit) -> Any:
    """The optimizer whose update ends a step; None where the update is by hand or calls a closure."""
    end = unit.call.ends[-1] if unit.is_update and unit.call.ends else None
    return end.optimizer() if end is not None and end.code is not None else None


@contextlib.contextmanager
def ending_at(optimizer: Any) -> Iterator[None]:
    """End a replay when an optimizer is to step: a function that is run as a whole goes on to other updates."""

    def step(*args: Any, **kwargs: Any) -> None:
        raise SegmentEnd

    with replaced(optimizer, "step", step) if optimizer is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def taking(step: Step, taken: Gradients) -> Iterator[None]:
    """Take the gradients of a replay, at the last moment at which they are there."""
    try:
        yield
    finally:
        trained = {id(tensor): tensor for tensor in [*step.runner.parameters, *step.runner.loose_leaves]}
        for tensor in trained.values():
            if tensor.grad is not None and tensor.grad.layout in (torch.strided, torch.sparse_coo):
                taken.append((tensor, tensor.grad.detach().clone()))
