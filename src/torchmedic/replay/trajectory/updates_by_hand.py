"""Updates that a loop makes by hand: in place, or by new tensors that it binds in place of the weights."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence

import torch

from torchmedic.observe.step.tensors import tensors_in
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step
from torchmedic.replay.trace.microscope import Leaf, Microscope, Op
from torchmedic.replay.trajectory.inner_updates import MOVES
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
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    made = [op for op in reversed(scope.ops) if op.spot and not op.node and op.spot.line in lines]
    return next((op for op in made if op.kind in MOVES), made[0] if made else None)


def _is_trained(source: int | Leaf | None) -> bool:
    return isinstance(source, Leaf) and source.tensor.requires_grad


def move(moves: Moves, factor: float) -> None:
    """Change the weights as the loop did by hand, by a multiple of it."""
    with torch.no_grad():
        for tensor, move in moves:
            tensor.add_(move * factor)
