"""Statements of a function body, made runnable on their own."""

from __future__ import annotations

import ast
from types import FrameType
from typing import Any

# Names that the prepared statements refer to, and that the runner defines.
END = "__torchmedic_end__"
AWAIT = "__torchmedic_await__"
RETURNED = "__torchmedic_returned__"


class Standalone(ast.NodeTransformer):
    """Make statements of a function body runnable on their own.

    With `gives_loss`, what the function returns is the loss, for which somebody else calls backward.
    """

    def __init__(self, frame: FrameType, *, gives_loss: bool = False) -> None:
        self._gives_loss = gives_loss
        parts = frame.f_code.co_qualname.split(".")
        parts = parts[:-1] if parts[-1] != "<module>" else []
        self._class = parts[-1] if parts and parts[-1] != "<locals>" else None
        self._first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else None
        self._loops = 0

    def visit_FunctionDef(self, node: ast.AST) -> ast.AST:
        return node  # its own returns and yields are none of ours

    visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = visit_FunctionDef

    def visit_For(self, node: ast.For | ast.While) -> ast.AST:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1
        return node

    visit_While = visit_For

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        end = self._end(node)
        if node.value is None:
            return end
        value = node.value
        if self._gives_loss:
            value = ast.copy_location(ast.Call(ast.Name(RETURNED, ast.Load()), [value], []), node)
        return [ast.copy_location(ast.Expr(value), node), end]

    def visit_Break(self, node: ast.Break | ast.Continue) -> ast.AST:
        return node if self._loops else self._end(node)

    visit_Continue = visit_Break

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    visit_Nonlocal = visit_Global

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        self.generic_visit(node)
        return node.value if node.value is not None else ast.copy_location(ast.Constant(None), node)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Call(ast.Name(AWAIT, ast.Load()), [node.value], []), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and self._first:
            node.args = [
                ast.copy_location(ast.Name("__class__", ast.Load()), node),
                ast.copy_location(ast.Name(self._first, ast.Load()), node),
            ]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self._class and node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = f"_{self._class.lstrip('_')}{node.attr}"
        return node

    def _end(self, node: ast.stmt) -> ast.stmt:
        return ast.copy_location(ast.Raise(ast.Name(END, ast.Load()), None), node)
