"""A loss, a gradient or a weight that is not finite -> the incident."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from torchmedic.observe.context import ProcessContext
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.stages import Quantity, UpdateStage
from torchmedic.observe.step.items import as_tuple, items_of
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.objects.finite import is_finite


class NonFinite(msgspec.Struct, frozen=True, kw_only=True):
    """The first step whose update would write NaN or infinity into the weights, or has done so."""

    quantity: Quantity  # what was seen to be bad
    stage: UpdateStage  # when it was seen
    step: int
    rank: int
    optimizers: tuple[Any, ...]
    stepping: Any  # the optimizer whose step it is, where one is under way
    bad: tuple[Any, ...]  # the parameters whose gradients are not finite
    damaged: tuple[Any, ...]  # the parameters that are not finite
    batch_indices: tuple[Any, ...] = ()
    loss: float | None = None  # the original one, of the last backward
    losses: tuple[float, ...] = ()  # of the last steps, that one included


def nonfinite_incident(optimizer: Any, quantity: Quantity, stage: UpdateStage, agent: ProcessContext) -> NonFinite:
    optimizers, losses = tuple(agent.clock.optimizers), agent.finite.losses
    recent = tuple(losses.recent)
    parameters = parameters_of(*([optimizer] if optimizer is not None else optimizers))
    return NonFinite(
        quantity=quantity,
        stage=stage,
        step=agent.clock.step,
        rank=agent.rank,
        optimizers=optimizers,
        stepping=optimizer,
        bad=tuple(tensor for tensor in parameters if tensor.grad is not None and not is_finite(tensor.grad)),
        damaged=tuple(tensor for tensor in parameters if not is_finite(tensor)),
        batch_indices=as_tuple(agent.batches.indices),
        loss=losses.last[-1] if losses.last else None,
        losses=recent,
    )


def of_call(incident: NonFinite, call: KeptBackward) -> NonFinite:
    """An incident dated back to the backward call that is taken for its cause."""
    items = items_of(call.origin)
    is_known = call.loss is not None and math.isfinite(call.loss)
    return msgspec.structs.replace(
        incident,
        quantity="gradient" if is_known else incident.quantity,
        step=call.step,
        loss=call.loss,
        batch_indices=as_tuple(items),
    )
