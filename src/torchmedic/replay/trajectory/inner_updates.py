"""Updates inside of a step: tensors that a step moves along their own gradient before it computes its loss.

The inner loop of meta-learning, the Langevin steps of an energy model, a simulation along the gradient of an energy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.autograd

from torchmedic.replay.isolation.torch_state import replaced
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.trace.microscope import Microscope, Op, storage_of

MOVES = frozenset({"add", "sub", "rsub"})
# What a gradient goes through until it is added: times a rate, clipped, averaged with others.
_SCALES = frozenset({"mul", "div", "neg", "clamp", "clone", "to_copy", "sign", "nan_to_num", "detach"})


@contextlib.contextmanager
def damped(factor: float) -> Iterator[None]:
    """A block in which `torch.autograd.grad` gives a multiple of every gradient."""
    engine: Any = torch.autograd
    run = engine._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if kwargs.get("accumulate_grad", True):
            return result
        return tuple(None if gradient is None else gradient * factor for gradient in result)

    with replaced(engine, "_engine_run_backward", run_backward):
        yield


def inner_update(played: ReplayResult, scope: Microscope) -> Op | None:
    """The first operation that adds gradients of `torch.autograd.grad` to what they are the gradients of.

    Args:
        played: A replay that ended in another backward call than the inner ones.
        scope: Has seen it.
    """
    inner = [tensor for call in played.backward_calls[:-1] for tensor in call.inputs]
    moved = {storage_of(tensor) for tensor in inner}
    steps = {storage_of(gradient) for gradient in played.returned}
    for op in scope.ops if moved and steps else ():
        given = {value.storage for value in op.inputs}
        if op.derived or given.isdisjoint(steps):
            continue
        kind = op.kind.strip("_").removeprefix("foreach_")
        if kind in MOVES and not (given - steps).isdisjoint(moved):
            return op
        if kind in _SCALES:
            steps |= {value.storage for value in op.outputs}
    return None
