"""Which line switched gradients off for the code that runs at a given line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torchmedic.observe.frames import is_user_file
from torchmedic.records import Location
from torchmedic.replay.frames import Frame, node_location, syntax_tree
from torchmedic.replay.microscope import Spot

_MODES = frozenset({"no_grad", "inference_mode", "set_grad_enabled", "_force_original_view_tracking"})


def where_switched_off(stack: Sequence[Spot], frames: Sequence[Frame]) -> Location | None:
    """The `with` block or decorator around one of these lines, else a call that left gradients off for good."""
    places = [(spot.file, spot.line) for spot in stack] + [(frame.file, frame.line) for frame in reversed(frames)]
    for file, line in places:
        found = _around(file, line)
        if found is not None:
            return node_location("cause", file, found, "gradients are switched off here")
    for file in _user_files():
        for node in ast.walk(syntax_tree(file) or ast.Module([], [])):
            if isinstance(node, ast.Call) and _switches_off(node) and not _is_managed(file, node):
                return node_location("cause", file, node, "gradients are switched off here, and stay off")
    return None


def _around(file: str, line: int) -> ast.expr | None:
    tree = syntax_tree(file)
    best: ast.expr | None = None
    for node in ast.walk(tree) if tree is not None else ():
        start = getattr(node, "lineno", None)
        if start is None or not start <= line <= (getattr(node, "end_lineno", None) or start):
            continue
        candidates: list[ast.expr] = []
        if isinstance(node, ast.With | ast.AsyncWith):
            candidates = [item.context_expr for item in node.items]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            candidates = node.decorator_list
        for expression in candidates:
            if _switches_off(expression) and (best is None or expression.lineno >= best.lineno):
                best = expression
    return best


def _switches_off(expression: ast.expr) -> bool:
    call = expression if isinstance(expression, ast.Call) else None
    function = call.func if call is not None else expression
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in _MODES:
        return False
    if name == "set_grad_enabled":
        given = call.args[0] if call is not None and call.args else None
        return not (isinstance(given, ast.Constant) and given.value is True)
    if name == "inference_mode" and call is not None and call.args:
        return not (isinstance(call.args[0], ast.Constant) and call.args[0].value is False)
    return True


def _is_managed(file: str, call: ast.Call) -> bool:
    """Whether a call is the head of a `with` or a decorator, whose effect ends with its block."""
    for node in ast.walk(syntax_tree(file) or ast.Module([], [])):
        heads: list[Any] = []
        if isinstance(node, ast.With | ast.AsyncWith):
            heads = [item.context_expr for item in node.items]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            heads = node.decorator_list
        if any(head is call for head in heads):
            return True
    return False


def _user_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_user_file(file):
            yield file
