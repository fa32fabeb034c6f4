"""Which expressions make up one term of a sum: the term itself, and what its names were assigned.

A sum is `a + b`, `a += b`, `sum(...)` or `torch.stack(...)`. A term of the last two is found by its position in the
list, the dict or the generator that is summed, also where another function of the user's returns that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

from torchmedic.source.assignments import assigned
from torchmedic.source.bindings import own_statements, reaching
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import FUNCTIONS, callee, function_of, has_line, nodes_in, own_nodes, syntax_tree

_MAX_EXPRESSIONS = 60
_MAX_DEPTH = 6  # levels of names and calls, to find a term in what is summed
_FILLING = frozenset({"append", "extend", "add", "update", "insert"})
_SUMMING = frozenset({"sum", "stack", "hstack", "fsum"})
_COPYING = frozenset({"list", "tuple", "values", "items"})

Sum = ast.BinOp | ast.AugAssign | ast.Call
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
Span = tuple[str, int, int | None, int | None, int | None]  # file, first line and column, last line and column
Callees = dict[Span, CodeType]  # by the expression that called: the function of the user's that ran


class Part(NamedTuple):
    """An expression, and the statement and the function that it belongs to."""

    file: str
    expression: ast.expr
    statement: ast.stmt
    scope: Scope

    def covers(self, spot: Spot) -> bool:
        node = self.expression
        return spot.file == self.file and (
            (node.lineno, node.col_offset) <= (spot.line, spot.column or 0)
            and (spot.end_line or spot.line, spot.end_column or 0) <= (node.end_lineno or 0, node.end_col_offset or 0)
        )


def span_of(spot: Spot) -> Span:
    return spot.file, spot.line, spot.column, spot.end_line, spot.end_column


def sum_at(spot: Spot) -> Sum | None:
    """The sum whose operator or call stands at a spot."""
    for node in nodes_in(syntax_tree(spot.file)):
        match node:
            case ast.BinOp(op=ast.Add() | ast.Sub()) | ast.AugAssign(op=ast.Add() | ast.Sub()):
                is_sum = True
            case ast.Call(args=[_, *_]):
                is_sum = callee(node) in _SUMMING
            case _:
                continue
        if is_sum and _span(spot.file, node) == span_of(spot):
            return node
    return None


def terms_of(found: Sum, file: str, *, index: int | None, is_right: bool, callees: Callees) -> tuple[Part, ...]:
    """The term of a sum that has no graph, and what it was taken out of; empty where it cannot be told.

    Args:
        found: The sum.
        file: Its file.
        index: The position of the term, where several are added in turn.
        is_right: Whether the term stands on the right of an operator.
        callees: The functions that ran.
    """
    scope = _scope(syntax_tree(file), found.lineno)
    statement = _statement(scope, found) if scope is not None else None
    if scope is None or statement is None:
        return ()
    if isinstance(found, ast.Call):
        whole = Part(file, found.args[0], statement, scope)
        return tuple(_element(whole, index, callees, _MAX_DEPTH)) if index is not None else ()
    left, right = operands(found)
    return (Part(file, right if is_right else left, statement, scope),)


def expression_at(spot: Spot) -> Part | None:
    """The expression that stands at a spot."""
    tree = syntax_tree(spot.file)
    scope = _scope(tree, spot.line)
    nodes = (node for node in nodes_in(tree) if isinstance(node, ast.expr) and _span(spot.file, node) == span_of(spot))
    found = next(nodes, None)
    statement = _statement(scope, found) if scope is not None and found is not None else None
    return None if scope is None or found is None or statement is None else Part(spot.file, found, statement, scope)


def value_of_call(method: str, file: str, line: int) -> Part | None:
    """What a method is called on, on a line; what is given to a call that it is called on, as `scaler.scale(loss)`."""
    tree = syntax_tree(file)
    scope = _scope(tree, line)
    for node in nodes_in(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr == method and has_line(node, line):
                statement = _statement(scope, node) if scope is not None else None
                return Part(file, owner, statement, scope) if scope is not None and statement is not None else None
    return None


def operands(found: ast.BinOp | ast.AugAssign) -> tuple[ast.expr, ast.expr]:
    return (found.target, found.value) if isinstance(found, ast.AugAssign) else (found.left, found.right)


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def parts_behind(terms: tuple[Part, ...]) -> list[Part]:
    """A term, and the expressions of the same function that its value was computed from."""
    pending = list(terms)
    flow: list[Part] = []
    seen: set[tuple[str, ast.stmt]] = set()
    while pending and len(flow) < _MAX_EXPRESSIONS:
        part = pending.pop(0)
        flow.append(part)
        where = part.statement
        for name in sorted(names_in(part.expression)):
            if (name, where) not in seen:
                seen.add((name, where))
                # What an earlier round of a loop has left, such as a running mean, is no part of this term.
                pending += [
                    Part(part.file, value, at, part.scope)
                    for value, at in _values(part.scope, name, where)
                    if at.lineno <= where.lineno and at is not where
                ]
    return flow


def _element(whole: Part, index: int, callees: Callees, depth: int) -> Iterator[Part]:
    """The item at a position of what is summed; with the expression that a comprehension computes of it."""
    expression = whole.expression
    if not depth:
        return
    code = callees.get(_span(whole.file, expression))
    if code is not None:
        yield from _returned(code, index, callees, depth - 1)
        return
    items: list[ast.expr] = []
    match expression:
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            items = [] if any(isinstance(each, ast.Starred) for each in elts) else elts
        case ast.Dict(keys=keys, values=values):
            items = values if None not in keys else []
        case ast.Call(func=ast.Name(), args=[inner]) if callee(expression) in _COPYING:
            yield from _element(whole._replace(expression=inner), index, callees, depth - 1)
        case ast.Call(func=ast.Attribute(value=inner), args=[]) if callee(expression) in _COPYING:
            yield from _element(whole._replace(expression=inner), index, callees, depth - 1)
        case ast.GeneratorExp(elt=elt, generators=[generator]) | ast.ListComp(elt=elt, generators=[generator]):
            if not generator.ifs:
                yield whole._replace(expression=elt)
                yield from _element(whole._replace(expression=generator.iter), index, callees, depth - 1)
        case ast.Name(id=name):
            yield from _element_of_name(whole, name, index, callees, depth)
    if index < len(items):
        yield whole._replace(expression=items[index])


def _element_of_name(whole: Part, name: str, index: int, callees: Callees, depth: int) -> Iterator[Part]:
    """The item at a position of a variable that was made once, and then filled in the order of the lines."""
    made = [
        (value, binding)
        for binding in reaching(whole.scope.body, name, whole.statement)
        if isinstance(binding, ast.Assign | ast.AnnAssign)
        for target, value in assigned(binding)
        if isinstance(target, ast.Name) and target.id == name
    ]
    if len(made) != 1:
        return
    value, binding = made[0]
    match value:
        case ast.List(elts=elts) | ast.Dict(values=elts):
            first = len(elts)
        case ast.Call(func=ast.Name(id="list" | "dict" | "OrderedDict"), args=[], keywords=[]):
            first = 0
        case _:
            yield from _element(Part(whole.file, value, binding, whole.scope), index, callees, depth - 1)
            return
    fills = _by_position(sorted(_fills(whole.scope, name, whole.statement), key=lambda fill: fill[1].lineno))
    if index < first:
        yield from _element(Part(whole.file, value, binding, whole.scope), index, callees, depth - 1)
    elif index - first < len(fills):
        yield Part(whole.file, *fills[index - first], whole.scope)


def _by_position(fills: list[tuple[ast.expr, ast.stmt]]) -> list[tuple[ast.expr, ast.stmt]]:
    """What a container holds in the end: an item that is assigned again keeps its place."""
    found: dict[object, tuple[ast.expr, ast.stmt]] = {}
    for value, statement in fills:
        match statement:
            case ast.Assign(targets=[ast.Subscript(slice=key)]):
                found[ast.unparse(key)] = (value, statement)
            case _:
                found[statement] = (value, statement)
    return list(found.values())


def _returned(code: CodeType, index: int, callees: Callees, depth: int) -> Iterator[Part]:
    """The item at a position of what a function returns or yields."""
    function = function_of(syntax_tree(code.co_filename), code)
    if function is None:
        return
    statements = list(own_statements(function))
    yields = [node for node in own_nodes(function) if isinstance(node, ast.Yield) and node.value is not None]
    returns = [each for each in statements if isinstance(each, ast.Return) and each.value is not None]
    if yields:
        if index < len(yields) and yields[index].value is not None:
            at = next((each for each in statements if any(node is yields[index] for node in ast.walk(each))), None)
            if at is not None:
                yield Part(code.co_filename, yields[index], at, function)
    elif len(returns) == 1 and returns[0].value is not None:
        whole = Part(code.co_filename, returns[0].value, returns[0], function)
        yield from _element(whole, index, callees, depth)


def _values(scope: Scope, name: str, where: ast.stmt) -> Iterator[tuple[ast.expr, ast.stmt]]:
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
    yield from _fills(scope, name, where)


def _fills(scope: Scope, name: str, where: ast.stmt) -> Iterator[tuple[ast.expr, ast.stmt]]:
    """What is put into a container of this name before a statement."""
    for statement in own_statements(scope):
        if statement.lineno >= where.lineno:
            continue
        match statement:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=own))], value=value) if own == name:
                yield value, statement
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=own), attr=method), args=[*_, value])
            ) if own == name and method in _FILLING:
                yield value, statement


def _span(file: str, node: ast.expr | ast.AugAssign) -> Span:
    return file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _scope(tree: ast.Module | None, line: int) -> Scope | None:
    """The innermost function around a line, or the module."""
    around: Scope | None = tree
    for node in nodes_in(tree):
        if isinstance(node, FUNCTIONS) and has_line(node, line):
            around = node  # breadth first: what comes later lies deeper
    return around


def _statement(scope: ast.AST, found: ast.expr | ast.AugAssign) -> ast.stmt | None:
    """The innermost statement that an expression is part of."""
    if isinstance(found, ast.AugAssign):
        return found
    around = [
        node
        for node in own_statements(scope)
        if not isinstance(node, ast.Module) and any(part is found for part in ast.walk(node))
    ]
    return around[-1] if around else None
