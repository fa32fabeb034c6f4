"""Which expressions of a function make up one term of a sum: the term itself, and what its names were assigned."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.source.assignments import assigned
from torchmedic.source.bindings import own_statements, reaching
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import FUNCTIONS, has_line, nodes_in, syntax_tree

_MAX_EXPRESSIONS = 60
_FILLING = frozenset({"append", "extend", "add", "update", "insert"})

Sum = ast.BinOp | ast.AugAssign


def sum_at(spot: Spot) -> Sum | None:
    """The `a + b`, `a - b` or `a += b` whose operator stands at a spot."""
    for node in nodes_in(syntax_tree(spot.file)):
        if (
            isinstance(node, ast.BinOp | ast.AugAssign)
            and isinstance(node.op, ast.Add | ast.Sub)
            and (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            == (spot.line, spot.column, spot.end_line, spot.end_column)
        ):
            return node
    return None


def operands(found: Sum) -> tuple[ast.expr, ast.expr]:
    return (found.target, found.value) if isinstance(found, ast.AugAssign) else (found.left, found.right)


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def expressions_behind(term: ast.expr, found: Sum, file: str) -> list[ast.expr]:
    """A term of a sum, and the expressions of the same function that its value was computed from."""
    tree = syntax_tree(file)
    scope = _scope(tree, found.lineno)
    statement = _statement(scope, found) if scope is not None else None
    if scope is None or statement is None:
        return [term]
    pending: list[tuple[ast.expr, ast.stmt]] = [(term, statement)]
    flow: list[ast.expr] = []
    seen: set[tuple[str, ast.stmt]] = set()
    while pending and len(flow) < _MAX_EXPRESSIONS:
        expression, where = pending.pop(0)
        flow.append(expression)
        for name in sorted(names_in(expression)):
            if (name, where) not in seen:
                seen.add((name, where))
                # What an earlier round of a loop has left, such as a running mean, is no part of this term.
                pending += [
                    (value, at)
                    for value, at in _values(scope, name, where)
                    if at.lineno <= where.lineno and at is not where
                ]
    return flow


def _values(
    scope: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module, name: str, where: ast.stmt
) -> Iterator[tuple[ast.expr, ast.stmt]]:
    for binding in reaching(scope.body, name, where):
        match binding:
            case ast.Assign() | ast.AnnAssign():
                for target, value in assigned(binding):
                    if isinstance(target, ast.Name) and target.id == name:
                        yield value, binding
            case ast.AugAssign(value=value, target=target):
                yield value, binding
                yield target, binding
            case ast.For(iter=over):
                yield over, binding
    for statement in own_statements(scope):
        if statement.lineno >= where.lineno:
            continue
        match statement:  # what is put into a container of this name
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=own))], value=value) if own == name:
                yield value, statement
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=own), attr=method), args=[*_, value])
            ) if own == name and method in _FILLING:
                yield value, statement


def _scope(tree: ast.Module | None, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Module | None:
    """The innermost function around a line, or the module."""
    around: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module | None = tree
    for node in nodes_in(tree):
        if isinstance(node, FUNCTIONS) and has_line(node, line):
            around = node  # breadth first: what comes later lies deeper
    return around


def _statement(scope: ast.AST, found: Sum) -> ast.stmt | None:
    """The innermost statement that a sum is part of."""
    if isinstance(found, ast.AugAssign):
        return found
    around = [
        node
        for node in own_statements(scope)
        if not isinstance(node, ast.Module) and any(part is found for part in ast.walk(node))
    ]
    return around[-1] if around else None
