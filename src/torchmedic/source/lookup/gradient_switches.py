"""Expressions of the user's code that switch gradients off: `with` blocks, decorators and calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import FUNCTIONS, last_name, syntax_tree

_MODES = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


class Switch(NamedTuple):
    """The expression that switches gradients off."""

    file: str
    node: ast.expr
    is_block: bool  # the head of a `with`
    stays: bool  # nothing switches them on again

    def location(self) -> Location:
        text = "gradients are switched off here" + (", and stay off" if self.stays else "")
        return node_location("cause", self.file, self.node, text)


def switch_around(file: str, line: int) -> Switch | None:
    """The innermost `with` block or decorator around a line that switches gradients off."""
    best: Switch | None = None
    at = 0
    for node in ast.walk(syntax_tree(file) or ast.Module([], [])):
        if not isinstance(node, ast.With | ast.AsyncWith | FUNCTIONS | ast.ClassDef):
            continue
        is_block = isinstance(node, ast.With | ast.AsyncWith)
        first = node.body[0].lineno if is_block else node.lineno
        if not first <= line <= (node.end_lineno or node.lineno):
            continue
        for head in heads(node):
            switch = head if switches_off(head) else _named_switch(file, head, node.lineno)
            if switch is not None and (best is None or head.lineno >= at):
                best, at = Switch(file, switch, is_block=is_block and switch is head, stays=False), head.lineno
    return best


def _named_switch(file: str, head: ast.expr, line: int) -> ast.expr | None:
    """`context = torch.no_grad() if ... else ...; with context:`: the call behind the name."""
    if not isinstance(head, ast.Name | ast.Attribute):
        return None
    name = ast.unparse(head)
    found = [
        part
        for node in ast.walk(syntax_tree(file) or ast.Module([], []))
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets)
        for part in ast.walk(node.value)
        if isinstance(part, ast.Call) and switches_off(part)
    ]
    return max((part for part in found if part.lineno <= line), key=lambda part: part.lineno, default=None)


def heads(node: ast.AST) -> list[ast.expr]:
    """The context managers of a `with` statement, or the decorators of a function or class."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return [item.context_expr for item in node.items]
    if isinstance(node, FUNCTIONS | ast.ClassDef):
        return node.decorator_list
    return []


def managed(tree: ast.Module) -> Iterator[ast.expr]:
    """The heads of blocks and the decorators, whose effect ends with their block."""
    for node in ast.walk(tree):
        yield from heads(node)


def switches_off(expression: ast.expr) -> bool:
    """Whether a context manager, a decorator or a call switches gradients off."""
    call = expression if isinstance(expression, ast.Call) else None
    function = call.func if call is not None else expression
    name = last_name(function)
    if name not in _MODES:
        return False
    given = [*call.args, *(word.value for word in call.keywords)] if call is not None else []
    value = given[0] if given else None
    if name == "set_grad_enabled":
        return not (isinstance(value, ast.Constant) and value.value is True)
    return not (name == "inference_mode" and isinstance(value, ast.Constant) and value.value is False)
