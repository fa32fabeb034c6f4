"""A copy of the model, as a teacher or a target network, that its own update makes larger and larger."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.replay.step.step import Step, whole_turn
from torchmedic.replay.trace.microscope import Microscope, Op, storage_of
from torchmedic.replay.trajectory.state import Follower, followers, largest
from torchmedic.source.segment.cut import CannotCut

_GROWN = 10.0  # times the largest weight that the trained module had
_OUTSIDE = 0.5  # of the elements of a copy: so many leave the range between the copy and the trained weights
_MAX_ROUNDING = 1e-5  # of the size of an element
_SMALLER_LOSS = 0.1  # of the loss, with the trained weights in place of the copy


class GrowingCopy(NamedTuple):
    """A copy that an update takes away from the weights that it follows."""

    op: Op  # of the update
    factor: float  # by which the copy is multiplied; 1 where it is only added to
    before: float  # its largest weight was at most this
    now: float
    loss: float  # of the present step
    other_loss: float  # with the trained weights in place of the copy


def growing_copy(evidence: NumbersEvidence) -> GrowingCopy | None:
    """The copy that grows by its own update; None where no copy has grown or its update is a mean of old and new."""
    copy = evidence.agent.finite.memory.oldest_copy()
    if copy is None or evidence.step is None or not evidence.frames:
        return None
    trained = {id(each) for each in parameters_of(*evidence.incident.optimizers)}
    then = {id(tensor): value for tensor, value in copy.pairs()}
    for follower in followers(evidence.step.runner.modules, trained):
        first = [then[id(weight)] for weight in follower.trained if id(weight) in then]
        if not first or largest(follower.own) <= _GROWN * largest(first):
            continue
        found = _update_of(evidence, follower)
        losses = [_loss(evidence.step, follower, is_exchanged=each) for each in (False, True)]
        if found is not None and None not in losses:
            loss, other = (each for each in losses if each is not None)
            return GrowingCopy(*found, largest(first), largest(follower.own), loss, other)
    return None


def _update_of(evidence: NumbersEvidence, follower: Follower) -> tuple[Op, float] | None:
    """The operation that takes a copy out of the range between the copy and the trained weights, and its factor."""
    try:
        step = whole_turn(evidence.frames[-1].live, evidence.agent)
    except CannotCut:
        return None
    scope = Microscope(deadline=evidence.deadline)
    after: list[torch.Tensor] = []
    played = step.runner.play(_taking(follower.own, after), scope)
    if played.error is not None or not played.backward_calls:
        return None
    scope.read()
    outside = [
        _leaves_range(*each) for each in zip(follower.own, follower.trained, after, strict=True) if each[0].numel() > 1
    ]
    if not outside or sum(outside) / len(outside) < _OUTSIDE:
        return None
    own = {storage_of(weight) for weight in follower.own}
    last = max(op.index for op in scope.ops if op.derived) if any(op.derived for op in scope.ops) else 0
    touching = [op for op in scope.ops[last + 1 :] if op.spot and own & {value.storage for value in op.inputs}]
    for op in touching:
        size = max((scope.magnitude(value) for value in op.inputs if value.storage in own), default=0.0)
        if op.kind in ("mul", "foreach_mul") and size > 0 and op.outputs:
            return op, scope.magnitude(op.outputs[0]) / size
    return (touching[-1], 1.0) if touching else None


def _leaves_range(own: torch.Tensor, trained: torch.Tensor, after: torch.Tensor) -> float:
    """The share of elements that an update takes out of the range between a copy and the trained weights."""
    own, trained = own.detach(), trained.detach()
    slack = _MAX_ROUNDING * torch.maximum(own.abs(), trained.abs())
    is_outside = (after > torch.maximum(own, trained) + slack) | (after < torch.minimum(own, trained) - slack)
    return float(is_outside.double().mean())


def _loss(step: Step, follower: Follower, *, is_exchanged: bool) -> float | None:
    """The loss of the step, with the trained weights in place of the copy if wanted."""
    with _exchanged(follower) if is_exchanged else contextlib.nullcontext():
        played = step.runner.play(keep_graphs=False)
    roots = [root for root in played.roots if root.numel() == 1]
    loss = float(roots[-1].detach().item()) if roots and played.error is None else math.nan
    return loss if math.isfinite(loss) or not is_exchanged else None


@contextlib.contextmanager
def _exchanged(follower: Follower) -> Iterator[None]:
    present = [(weight, weight.data) for weight in follower.own]
    try:
        for weight, trained in zip(*follower, strict=True):
            weight.data = trained.detach().clone()
        yield
    finally:
        for weight, data in present:
            weight.data = data


@contextlib.contextmanager
def _taking(weights: Sequence[torch.Tensor], after: list[torch.Tensor]) -> Iterator[None]:
    """Take the weights at the end of a replay, before they are put back."""
    try:
        yield
    finally:
        after += [weight.detach().clone() for weight in weights]


def explains(found: GrowingCopy) -> bool:
    """Whether the loss is ordinary with the trained weights in place of the copy."""
    return not math.isfinite(found.loss) or abs(found.other_loss) < _SMALLER_LOSS * abs(found.loss)
