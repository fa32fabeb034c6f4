"""What is set up around the replay of one step: where it ends, what is taken from it, what is left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from torchmedic.replay.isolation.torch_state import replaced
from torchmedic.replay.step.runner import SegmentEnd
from torchmedic.replay.step.step import Step
from torchmedic.replay.trajectory.change import Gradients
from torchmedic.replay.trajectory.units import Unit


@contextlib.contextmanager
def unscaled() -> Iterator[None]:
    """Leave the factor of a GradScaler out: the updates were made with gradients that it had been taken from again."""
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
