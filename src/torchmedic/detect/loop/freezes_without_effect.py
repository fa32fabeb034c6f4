"""Parts of a model that a line was to freeze by an attribute that torch does not read, and that are trained.

`p.require_grad = False` gives a parameter an attribute with a new name. `body.requires_grad = False` gives a module
an attribute of its own: its parameters stay as they are. The attribute, the parameters and the optimizer are asked.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

import torch
from torch import nn

from torchmedic.detect.loop.frozen_layers import called_in_training
from torchmedic.detect.loop.incident import FreezeWithoutEffect, LoopIncident
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import nodes_in
from torchmedic.source.user_variables import user_trees

_MIN_STEPS = 6
_MEANT = "requires_grad"
_ALIKE = 0.85  # `require_grad`, `required_grad`, `requires_gradient`; not `has_grad`, `grad_norm`


def find(habits: Habits) -> Iterator[LoopIncident]:
    if habits.steps < _MIN_STEPS:
        return
    optimizers = [watched.optimizer for watched in habits.optimizers.values() if watched.optimizer is not None]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # What has no gradient may be kept out of the training in another way, as by `torch.no_grad()`.
    trained = {id(tensor): tensor for group in groups for tensor in group["params"] if tensor.grad is not None}
    marked = [(name, tensor) for tensor in trained.values() if (name := _mistyped(tensor))]
    parts = [part for root in called_in_training(habits) for part in root.modules() if _is_marked(part, trained)]
    found = _line(marked[0][0], of_module=False) if marked else _line(_MEANT, of_module=True) if parts else None
    if found is None:
        return
    place, owner = found
    tensors = [tensor for _, tensor in marked] or [tensor for part in parts for tensor in part.parameters()]
    yield FreezeWithoutEffect(
        step=habits.steps,
        cause=place,
        optimizer=0,
        what=marked[0][0] if marked else _MEANT,
        owner=owner,
        is_module=not marked,
        still_trained=len({id(tensor) for tensor in tensors} & trained.keys()),
    )


def _mistyped(tensor: torch.Tensor) -> str:
    """An attribute of a parameter that is off, and whose name is nearly `requires_grad`."""
    off = [name for name, value in vars(tensor).items() if value is False]
    name = next(iter(difflib.get_close_matches(_MEANT, off, 1, _ALIKE)), "")
    return "" if name and _is_read(name) else name


def _is_marked(part: nn.Module, trained: dict[int, torch.Tensor]) -> bool:
    is_off = vars(part).get(_MEANT) is False and not _is_read(_MEANT, type(part).__name__)
    tensors = list(part.parameters()) if is_off else []
    return all(tensor.requires_grad for tensor in tensors) and any(id(tensor) in trained for tensor in tensors)


def _is_read(attr: str, of_class: str = "") -> bool:
    """Whether the user's code reads an attribute: it has a meaning there; of a class, whether its methods read it."""
    places = (node for _, tree in user_trees() for node in nodes_in(tree))
    if of_class:
        places = (
            part
            for node in places
            if isinstance(node, ast.ClassDef) and node.name == of_class
            for part in ast.walk(node)
        )
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == attr
        and isinstance(node.ctx, ast.Load)
        and (not of_class or ast.unparse(node.value) == "self")
        for node in places
    )


def _line(attr: str, *, of_module: bool) -> tuple[Place, str] | None:
    """The line that sets the attribute, and on what.

    A class may have a `requires_grad` of its own, so what it sets on `self` is left out; so is a line that is undone.
    """
    lines: dict[str, list[tuple[Place, bool]]] = {}
    for file, tree in user_trees():
        for node in nodes_in(tree):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=owner, attr=name)], value=value) if name == attr:
                    is_off = isinstance(value, ast.Constant) and value.value is False
                    lines.setdefault(ast.unparse(owner), []).append((Place(file, node.lineno), is_off))
    for text, places in lines.items():
        if not of_module or (text != "self" and all(is_off for _, is_off in places)):
            return places[0][0], text
    return None
