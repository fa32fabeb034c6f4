"""Where a `torch.autograd.Function` of the user's saves what it keeps for backward.

The node keeps it, but the node is made where the function is applied, perhaps at many places: the line to look at is
the one that saves.
"""

from __future__ import annotations

import ast
import functools
import inspect
from typing import Any

import torch

from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import nodes_in
from torchmedic.source.user_code import is_user_file


def function_of(node: Any) -> type | None:
    """The class whose `apply` has made a node; None for those of torch itself."""
    found = getattr(type(node), "_forward_cls", None)
    return found if isinstance(found, type) else None


def applied_in(variables: dict[str, Any]) -> type | None:
    """The class that is being applied, by the variables of `Function.apply`."""
    kind = variables.get("cls")
    return kind if isinstance(kind, type) and issubclass(kind, torch.autograd.Function) else None


@functools.cache
def saving_line(kind: type) -> Spot | None:
    """The statement of such a class that saves; None where several do, or where the class is a library's."""
    for name in ("setup_context", "forward"):
        for base in kind.__mro__:
            method: Any = base.__dict__.get(name)
            code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
            if code is not None and is_user_file(code.co_filename):
                saving = _saving(code.co_filename, code.co_firstlineno, name)
                if saving is not None:
                    return _spot(code.co_filename, saving, name)
                break
    return None


def _saving(file: str, first: int, name: str) -> ast.expr | ast.stmt | None:
    tree = syntax_tree(file)
    for node in nodes_in(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != name or not node.args.args:
            continue
        if min([node.lineno, *(each.lineno for each in node.decorator_list)]) != first:
            continue
        context = node.args.args[0].arg
        calls: list[ast.expr | ast.stmt] = [
            each
            for each in ast.walk(node)
            if isinstance(each, ast.Call) and ast.unparse(each.func) == f"{context}.save_for_backward" and each.args
        ]
        return calls[0] if len(calls) == 1 else _attribute(node, context) if not calls else None
    return None


def _attribute(function: ast.FunctionDef, context: str) -> ast.stmt | None:
    """`ctx.x = x`, where it is the only one that is no plain number or text."""
    kept: list[ast.stmt] = [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.Assign)
        and not isinstance(each.value, ast.Constant)
        and any(isinstance(part, ast.Attribute) and ast.unparse(part.value) == context for part in each.targets)
    ]
    return kept[0] if len(kept) == 1 else None


def _spot(file: str, node: ast.expr | ast.stmt, function: str) -> Spot:
    return Spot(file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, function)
