"""The check-up for unit tests: one forward and backward pass of a model on a batch, looked at and then undone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask_each
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe import lifecycle
from torchmedic.observe.checkup.graph_facts import all_zero
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.node_births import NodeBirths
from torchmedic.observe.checkup.unreached_parameters import Missing, Unreached
from torchmedic.records import Diagnosis
from torchmedic.replay.isolation.torch_state import preserved


def checkup(model: torch.nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor]) -> list[Diagnosis]:
    """Look for silent mistakes in one training step of a model.

    The step is a forward and a backward pass, without an update. Afterwards weights, gradients, buffers, modes and
    random numbers are as they were.

    Args:
        model: The model, in the mode in which it is to be looked at.
        batch: `(inputs, targets)`; the loss is then `loss_fn(model(inputs), targets)`. Inputs may be a tuple or a
            mapping of arguments. Anything else is given to the model as it is, and the loss is `loss_fn(output)`.
        loss_fn: A function or module that returns the loss as one number.

    Returns:
        What was found; nothing for a healthy step.

    Raises:
        TypeError: `loss_fn` did not return a tensor.
    """
    frame = sys._getframe(1)
    parameters = [tensor for tensor in model.parameters() if tensor.requires_grad]
    with _undisturbed(), preserved([model], parameters), torch.enable_grad():
        graph = _step(model, batch, loss_fn, parameters, frame)
        unreached = _missing(parameters)
        if unreached.missing:
            unreached.cuts.arm([tensor for tensor in parameters if tensor.grad is None])
            try:
                _loss(model, batch, loss_fn)
            finally:
                unreached.cuts.disarm()
        evidence = CheckUp(
            [graph], frame, optimized=parameters, unreached=unreached, models=[model], sure_after_one=True
        )
        found = ask_each(evidence, registry.CHECKUP)
    return [diagnosis for diagnosis in found if diagnosis.severity != "note"]


def _step(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: Callable[..., torch.Tensor],
    parameters: list[torch.nn.Parameter],
    frame: FrameType,
) -> LossGraph:
    for tensor in parameters:
        tensor.grad = None  # what is there is put back at the end
    births = NodeBirths()
    births.arm()
    try:
        loss = _loss(model, batch, loss_fn)
    finally:
        births.disarm()
    graph = LossGraph(births, [loss], (frame.f_code.co_filename, frame.f_lineno), 0)
    loss.backward()
    graph.is_zero = all_zero(tensor.grad for tensor in parameters)
    graph.fetch(may_wait=True)
    graph.has_arrived()
    return graph


def _loss(model: torch.nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor]) -> torch.Tensor:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        loss = loss_fn(_output(model, batch[0]), batch[1])
    else:
        loss = loss_fn(_output(model, batch))
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss_fn returned {type(loss).__name__}, not a tensor")
    return loss


def _output(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _missing(parameters: list[torch.nn.Parameter]) -> Unreached:
    """The parameters that this step gave no gradient, where it gave others one."""
    unreached = Unreached()
    unreached.steps = 1
    if any(tensor.grad is not None for tensor in parameters):
        unreached.missing = [Missing(tensor) for tensor in parameters if tensor.grad is None]
    return unreached


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hide the check-up from the agent, where the tests themselves run under torchmedic."""
    watching = lifecycle.current()
    if watching is None:
        yield
        return
    watching.checkup.births.disarm()
    with watching.paused():
        yield
