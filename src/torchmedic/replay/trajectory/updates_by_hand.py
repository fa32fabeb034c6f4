"""Updates that a loop makes by hand: in place, or by new tensors that it binds in place of the weights.

Also updates inside of a step, of tensors that the step moves along their own gradient before it computes its loss: the
inner loop of meta-learning, the Langevin steps of an energy model, a simulation along the gradient of an energy.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.autograd

from torchmedic.observe.numbers.func_losses import is_trained
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.replay.isolation.torch_state import replaced
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step
from torchmedic.replay.trace.microscope import Leaf, Microscope, Op, storage_of
from torchmedic.source.assignments import names_written

Moves = list[tuple[torch.Tensor, torch.Tensor]]  # weights, and what was added to each


@contextlib.contextmanager
def taking_moves(step: Step, taken: Moves, trained: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take the changes that a replay makes to the weights, before they are undone.

    Args:
        step: The step.
        taken: Gets the changes.
        trained: Weights that are known whatever holds them.
    """
    runner = step.runner
    held = [tensor for module in runner.modules for tensor in module.parameters()]
    leaves = {id(tensor): tensor for tensor in [*runner.loose_leaves, *held, *trained]}
    before = {key: tensor.detach().clone() for key, tensor in leaves.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            taken += [(tensor, tensor.detach() - before[key]) for key, tensor in leaves.items()]


def rebound(step: Step, played: ReplayResult) -> Moves:
    """The changes to the weights of a step that binds new tensors: `params = [p - lr * g for p, g in ...]`."""
    found: Moves = []
    for name in bound_again(step):
        before, after = tensors_in(step.runner._locals[name], 2), tensors_in(played.namespace.get(name), 2)
        if [tensor.shape for tensor in before] == [tensor.shape for tensor in after]:
            pairs = [(old, new) for old, new in zip(before, after, strict=True) if new is not old]
            found += [(old, new.detach() - old.detach()) for old, new in pairs]
    return found


def bound_again(step: Step) -> list[str]:
    """The variables with trained tensors that a step gives new values."""
    runner = step.runner
    written = {name for statement in runner.segment.statements for name in names_written(statement)}
    trained = {id(tensor) for tensor in runner.loose_leaves}
    return sorted(
        name
        for name in written & runner._locals.keys()
        if (held := tensors_in(runner._locals[name], 2)) and all(id(tensor) in trained for tensor in held)
    )


def rebinding(step: Step) -> ast.stmt | None:
    """The last statement that binds new tensors in place of the weights."""
    names = bound_again(step)
    statements = reversed(step.runner.segment.statements)
    return next((each for each in statements if not set(names).isdisjoint(names_written(each))), None)


def updating_op(step: Step, scope: Microscope) -> Op | None:
    """The last operation that writes to the weights, or that binds new tensors in place of the weights.

    Args:
        step: The step, up to the end of its turn of the loop.
        scope: Has seen a replay of the step.
    """
    for op in reversed(scope.ops):
        written = [scope.source(value) for value in op.inputs if value.storage in op.written]
        if op.spot is not None and not op.derived and any(_is_trained(source) for source in written):
            return op
    statement = rebinding(step)
    if statement is None:
        return None
    plain = [op for op in reversed(scope.ops) if op.spot and not op.node]
    moves = [op for op in plain if op.kind in MOVES]
    for op in moves:  # perhaps in a function that the statement calls
        if any(_is_trained(scope.source(value)) for value in op.inputs):
            return op
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    made = [op for op in plain if op.spot is not None and op.spot.line in lines]
    return next((op for op in made if op in moves), made[0] if made else None)


def _is_trained(source: int | Leaf | None) -> bool:
    return isinstance(source, Leaf) and (source.tensor.requires_grad or is_trained(source.tensor))


def move(moves: Moves, factor: float) -> None:
    """Change the weights as the loop did by hand, by a multiple of it."""
    with torch.no_grad():
        for tensor, move in moves:
            tensor.add_(move * factor)


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
    """The first operation that adds a gradient of `torch.autograd.grad` to the tensor of this gradient.

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
