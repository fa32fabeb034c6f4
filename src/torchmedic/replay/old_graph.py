"""Which part of a loss's graph is older than the step, and which variable brought it in."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.replay.bindings import own_statements
from torchmedic.replay.frames import Frame
from torchmedic.replay.graph import nodes_behind
from torchmedic.replay.scopes import function_body

_ACCUMULATE = "AccumulateGrad"


class Carrier(NamedTuple):
    """A variable whose value still hangs on the graph of an earlier step."""

    name: str
    tensor: torch.Tensor


def older_than(nodes: Iterable[Any], sequence_number: int) -> set[Any]:
    """The nodes that were made before a step began."""
    return {node for node in nodes if node._sequence_nr() < sequence_number}


def carriers(variables: dict[str, Any], old: set[Any]) -> list[Carrier]:
    """The variables that hang on old nodes; those nearest to the new part first."""
    found = [Carrier(name, tensor) for name, tensor in _tensors(variables) if tensor.grad_fn in old]
    return sorted(found, key=lambda carrier: -carrier.tensor.grad_fn._sequence_nr())  # type: ignore[union-attr]


def _tensors(variables: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in variables.items():
        yield from _within(name, value, 2)
        if not isinstance(value, torch.Tensor | type | dict | list | tuple) and hasattr(value, "__dict__"):
            for attribute, held in list(vars(value).items())[:200]:
                if not attribute.startswith("__"):
                    yield from _within(f"{name}.{attribute}", held, 2)


def _within(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield name, value
    elif depth and isinstance(value, tuple | list):
        for item in value[:64]:
            yield from _within(name, item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in list(value.values())[:64]:
            yield from _within(name, item, depth - 1)


def binding_of(frame: Frame, name: str) -> ast.stmt | None:
    """The statement that gives a carried variable its value: the last one that is not a plain reset."""
    attribute = name.rsplit(".", 1)[-1] if "." in name else None
    body = frame.tree if attribute is not None else function_body(frame)
    if body is None:
        return None
    statements = ast.walk(body) if attribute is not None else own_statements(body)
    found = [
        statement
        for statement in statements
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign)
        and _binds(statement, attribute or name, is_attribute=attribute is not None)
        and not _is_reset(statement)
    ]
    return max(found, key=lambda statement: statement.lineno, default=None)


def _binds(statement: ast.Assign | ast.AugAssign | ast.AnnAssign, name: str, *, is_attribute: bool) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for node in (part for target in targets for part in ast.walk(target)):
        if is_attribute and isinstance(node, ast.Attribute) and node.attr == name:
            return True
        if not is_attribute and isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
    return False


def _is_reset(statement: ast.Assign | ast.AugAssign | ast.AnnAssign) -> bool:
    """`h = None`, `total = 0`, `h = torch.zeros(...)`: nothing that could carry a graph."""
    if isinstance(statement, ast.AugAssign) or statement.value is None:
        return False
    value = statement.value
    if isinstance(value, ast.Constant | ast.List) or (isinstance(value, ast.UnaryOp)):
        return True
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in (
        "zeros",
        "ones",
        "zeros_like",
        "randn",
        "empty",
        "tensor",
    )
