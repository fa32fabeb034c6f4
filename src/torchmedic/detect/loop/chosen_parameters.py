"""Whether a script chooses by itself which parameters an optimizer gets, so that the others are left out on purpose."""

from __future__ import annotations

import ast

import torch

from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.syntax import callee, nodes_in, syntax_tree

_OPTIMIZERS = frozenset(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
)


def is_chosen(habits: Habits) -> bool:
    """Whether the file that builds an optimizer selects parameters by a condition, or builds more optimizers."""
    built = [watched.built for watched in habits.optimizers.values() if watched.built is not None]
    for file in {place.file for place in built}:
        lines = {place.line for place in built if place.file == file}
        for node in nodes_in(syntax_tree(file)):
            match node:
                case ast.Call() if callee(node) in _OPTIMIZERS:
                    if not lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                        return True
                case ast.Call(func=ast.Name(id="filter"), args=[ast.Lambda(body=condition), _]):
                    if not _keeps_trainable(condition):
                        return True
                case ast.Call() if callee(node) in ("filter", "add_param_group"):
                    return True
                case ast.comprehension(ifs=[_, *_]) if "parameters" in ast.unparse(node.iter):
                    if not all(map(_keeps_trainable, node.ifs)):
                        return True
    return False


def _keeps_trainable(condition: ast.expr) -> bool:
    """Whether a condition leaves out frozen parameters only: a layer that gets gradients was not left out by it."""
    return isinstance(condition, ast.Attribute) and condition.attr == "requires_grad"
