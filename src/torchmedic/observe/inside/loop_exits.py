"""What decides whether a loop ends, by its source: what its exits read, and what in its body could change that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.observe.inside.peek import is_length
from torchmedic.source.syntax import ADDING_METHODS, TAKING_METHODS

Loop = ast.While | ast.For

_PURE = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Subscript)
_SMALL_PARTS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
_BUILTINS = frozenset(("len", "abs", "min", "max", "int", "float", "bool", "isinstance"))
_CHANGES = ADDING_METHODS | TAKING_METHODS


class Exits(NamedTuple):
    """What the exits of a loop read, by its text, and what the branches read that could change any of it.

    `judged` is that nothing else could: no call whose answer is not known, no assignment in every round.
    """

    read: dict[str, ast.expr]
    guards: dict[str, ast.expr]
    judged: bool
    guards_judged: bool


def exits_of(loop: Loop, tree: ast.Module) -> Exits:
    tests = [loop.test] if isinstance(loop, ast.While) else []
    tests += [branch.test for branch in _ways_out(loop)]
    read = _read(tests)
    if not read:
        return Exits({}, {}, False, False)
    branches = [node.test for node in ast.walk(loop) if isinstance(node, ast.If)]
    guards = _read(branches, lengths=True)
    return Exits(
        read,
        guards or {},
        judged=not any(_may_change(text, loop, tree) for text in read),
        guards_judged=guards is not None,
    )


def comparisons_of(loop: Loop) -> list[tuple[ast.expr, ast.expr]]:
    """The two sides of every exit of a loop; empty if an exit is more than a comparison of two things."""
    tests: list[tuple[ast.expr, type[ast.cmpop]]] = [(branch.test, ast.NotEq) for branch in _ways_out(loop)]
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        tests.append((loop.test, ast.Eq))
    found = []
    for test, unlikely in tests:
        match test:
            case ast.Compare(
                left=left, ops=[ast.Eq() | ast.NotEq() | ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() as op]
            ):
                if isinstance(op, unlikely):
                    return []  # anything but one value ends the loop
                found.append((left, test.comparators[0]))
            case _:
                return []
    return found


def has_no_way_out(loop: Loop) -> bool:
    """`while True` without `break`, `return`, `raise` or `yield`."""
    if not isinstance(loop, ast.While) or not (isinstance(loop.test, ast.Constant) and loop.test.value):
        return False
    return not any(
        isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) or _leaves(node, loop) for node in ast.walk(loop)
    )


def _read(tests: list[ast.expr], *, lengths: bool = False) -> dict[str, ast.expr] | None:
    """The names and attributes that tests read; None where a call has a say in it, whose answer is not known.

    With `lengths`, `len(x)` is read and not `x`, which may be made anew in each round.
    """
    found: dict[str, ast.expr] = {}
    for test in tests:
        measured = [node for node in ast.walk(test) if lengths and is_length(node)]
        found |= {ast.unparse(node): node for node in measured}
        inside = {id(part) for node in measured for part in ast.walk(node)}
        owners = {id(node.value) for node in ast.walk(test) if isinstance(node, ast.Attribute)}
        for node in ast.walk(test):
            if id(node) in inside:
                continue
            if isinstance(node, ast.Call):
                if not isinstance(node.func, ast.Name) or node.func.id not in _BUILTINS:
                    return None
            elif not isinstance(node, _PURE + _SMALL_PARTS):
                return None
            if id(node) in owners and isinstance(node, ast.Name):
                continue  # its attribute is read
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) not in _BUILTINS:
                found[ast.unparse(node)] = node
    return found


def _may_change(text: str, loop: Loop, tree: ast.Module) -> bool:
    """Whether something in every round may give this another value. What only a branch does is told by its test."""
    base = text.partition(".")[0]
    for statement in _always(loop.body):
        for node in ast.walk(statement):
            if text in _targets(node):
                return True
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and _reaches(node, base, text):
            return True
    if isinstance(loop, ast.For) and any(text == ast.unparse(node) for node in ast.walk(loop.target)):
        return True
    called = any(isinstance(node, ast.Call) for node in ast.walk(loop))
    shared = any(isinstance(node, ast.Global | ast.Nonlocal) and base in node.names for node in ast.walk(tree))
    return called and shared


def _always(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body that no branch decides on. One with a `continue` decides on all that follow it."""
    for statement in body:
        if isinstance(statement, ast.If):
            if any(isinstance(node, ast.Continue) for node in ast.walk(statement)):
                return
        elif isinstance(statement, ast.With):
            yield from _always(statement.body)
        else:
            yield statement


def _targets(node: ast.AST) -> set[str]:
    """What a statement gives a new value."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
        found = [node.target]
    elif isinstance(node, ast.With):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        found = [node.func.value]
    return {ast.unparse(part) for target in found for part in ast.walk(target) if isinstance(part, ast.expr)}


def _reaches(call: ast.Call, base: str, text: str) -> bool:
    """Whether a call is given the object whose attribute is read, and so may change it."""
    if base == text:
        return False  # a variable: no call can change what it stands for
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if isinstance(call.func, ast.Attribute):
        given.append(call.func.value)
    return any(isinstance(part, ast.Name) and part.id == base for part in given)


def _ways_out(loop: Loop) -> list[ast.If]:
    """The branches of a loop that leave it."""
    return [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.If)
        and any(_leaves(inner, loop) for part in node.body + node.orelse for inner in ast.walk(part))
    ]


def _leaves(node: ast.AST, loop: Loop) -> bool:
    return isinstance(node, ast.Return | ast.Raise) or (isinstance(node, ast.Break) and _loop_of(node, loop) is loop)


def _loop_of(wanted: ast.Break, loop: Loop) -> Loop:
    """Which loop a `break` ends."""
    owner: Loop = loop
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.While | ast.For)
            and node is not loop
            and any(each is wanted for each in ast.walk(node))
        ):
            owner = node
    return owner
