"""Parameters that cannot get a gradient: those in reach of a failed step, and where one was made without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.carried_tensors import carrier_of
from torchmedic.records import Location
from torchmedic.replay.trace.older_graph import Import, named
from torchmedic.replay.trace.provenance import Provenance
from torchmedic.source.spots import spot_of_traced


def parameters_in_reach(failure: BackwardFailure) -> list[torch.Tensor]:
    """The parameters of the optimizers and of the modules that the step's frame can see."""
    if failure.step is None:
        return []
    runner = failure.step.runner
    found = [*runner.parameters, *(tensor for module in runner.modules for tensor in module.parameters())]
    return list({id(tensor): tensor for tensor in found}.values())


def leaves_in_reach(failure: BackwardFailure) -> list[torch.Tensor]:
    """Plain tensors that collect gradients, of a functional model."""
    values: list[Any] = []
    for frame in failure.evidence.frames:
        if frame.is_user:
            values += [*frame.variables.values(), *frame.live.f_globals.values()]
    items = [part for value in values if isinstance(value, list | tuple) for part in value]
    items += [part for value in values if isinstance(value, dict) and len(value) < 200 for part in value.values()]
    return [
        value
        for value in [*values, *items]
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    ]


@contextlib.contextmanager
def unfrozen(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """What the step is like with these parameters trainable; for a trial."""
    frozen = [
        tensor for tensor in parameters if tensor.is_leaf and tensor.is_floating_point() and not tensor.requires_grad
    ]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def never_trainable(
    failure: BackwardFailure, provenance: Provenance, root: torch.Tensor
) -> tuple[str, torch.Tensor, Location] | None:
    """A tensor behind the loss that was there before the step and was made without requires_grad, where it was made.

    Those that an optimizer is to train come first; without an optimizer, those that no loop makes anew.
    """
    trained = {id(tensor) for tensor in failure.step.runner.parameters} if failure.step is not None else set()
    sources = [tensor for tensor in provenance.sources_behind(root) if tensor.is_floating_point()]
    sources.sort(key=lambda tensor: id(tensor) not in trained)
    found = []
    for tensor in sources:
        if trained and id(tensor) not in trained:
            break
        holders = [
            holder
            for frame in reversed(failure.evidence.frames)
            if frame.is_user
            for holder in named(tensor, frame.live, spot_of_traced(frame), is_local=False)
        ]
        carrier = carrier_of(failure, provenance, Import(tensor, tuple(holders)), resets=True)
        if carrier is not None and not carrier[1].in_loop:
            name, made = carrier
            found.append((name, tensor, made.location("cause", f"`{name}` is made here")))
    return min(found, key=lambda item: item[2].line, default=None)
