"""Questions about Python syntax that many modules ask: kinds of nodes, the name of a call, the lines of a node.

Imports no torch: the parent process and the view into a hung process use this module too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
CALLABLES = FUNCTIONS | ast.Lambda
LOOPS = ast.For | ast.AsyncFor | ast.While
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
LEAVING = ast.Return | ast.Continue | ast.Break | ast.Raise  # statements behind which a block does not go on

Path = tuple[ast.AST, ...]  # the nodes around a node, outermost first


def nodes_in(tree: ast.AST | None) -> Iterator[ast.AST]:
    """A node and all nodes below it; nothing where there is no source."""
    return ast.walk(tree) if tree is not None else iter(())


def last_name(node: ast.AST) -> str:
    """The last identifier of a dotted name: `arange` of `torch.arange`; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def callee(call: ast.Call) -> str:
    """The name of the function or method that is called: `append` of `self.losses.append(x)`."""
    return last_name(call.func)


def first_line(function: ast.AST) -> int:
    """The first line of a function, decorators included, as in `co_firstlineno` of its code."""
    decorators = getattr(function, "decorator_list", [])
    return int(min([function.lineno, *(each.lineno for each in decorators)]))  # type: ignore[attr-defined]


def has_line(node: ast.stmt | ast.expr, line: int) -> bool:
    """Whether a statement or an expression covers a line."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def function_around(path: Path) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    """The innermost function in a path."""
    return next((node for node in reversed(path) if isinstance(node, CALLABLES)), None)
