"""Statements that compute new values and throw them away: `ids.masked_fill(chosen, 0)`, `p = p.clamp(0, 1)`.

An operation of torch's without a trailing underscore changes nothing: it returns a new tensor. As a statement of its
own it has no effect. Neither has an assignment to the variable of a loop over parameters that nothing reads afterwards
(`p = p - rate * p.grad`): the name gets another value, the parameter stays as it is. Only functions that the running
code names are looked at. Left alone are operands that nobody reads, as of a trial or a warm-up: there the twin in place
would change nothing.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from torchmedic.detect.loop.incident import LoopIncident, ResultThrownAway
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import (
    CALLABLES,
    FUNCTIONS,
    LOOPS,
    callee,
    function_of,
    has_line,
    is_module,
    nodes_in,
    own_nodes,
    syntax_tree,
)
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import roots, user_trees

_MIN_STEPS = 6
_MAX_FUNCTIONS = 400
# Operations that have a twin which writes in place, and whose names nothing but tensors knows: a plot has `scatter`.
_UNMISTAKABLE = frozenset(
    "masked_fill masked_scatter clamp clamp_min clamp_max index_fill index_copy index_add scatter_add "
    "tril triu lerp addcmul addcdiv".split()
)
_PARAMETERS = frozenset("parameters named_parameters buffers named_buffers".split())
_MODULES = frozenset("torch th F functional".split())
_NUMBERS = frozenset("float int abs min max len".split())


def find(habits: Habits) -> Iterator[LoopIncident]:
    turns = habits.steps if habits.optimizers else sum(event.kind == "backward" for event in habits.events)
    if turns < _MIN_STEPS:
        return
    found = [(file, *each) for file, tree in user_trees() for each in _in_file(tree)]
    running = set(_functions()) if found else set()
    own = {function.name for function in running if isinstance(function, FUNCTIONS)}
    variables = [(file, name, value) for file, _, name, value in roots(sys._getframe())] if found else []
    for file, function, statement, what in found:
        if function in running and what not in own and not _is_other(file, _operand(statement), variables):
            yield ResultThrownAway(
                step=habits.steps,
                cause=Place(file, statement.lineno),
                optimizer=0,
                what=what,
                is_rebound=isinstance(statement, ast.Assign),
            )


@functools.lru_cache(maxsize=256)
def _in_file(tree: ast.Module) -> tuple[tuple[ast.AST, ast.Expr | ast.Assign, str], ...]:
    functions = [tree, *(node for node in nodes_in(tree) if isinstance(node, FUNCTIONS))]
    found = [(function, *each) for function in functions for each in thrown_away(function)]
    strange = {  # what is no tensor, as its attributes show
        ast.unparse(node.value)
        for node in (nodes_in(tree) if found else ())
        if isinstance(node, ast.Attribute) and not hasattr(torch.Tensor, node.attr)
    }
    return tuple(each for each in found if isinstance(each[1], ast.Assign) or _operand(each[1]) not in strange)


def _functions() -> Iterator[ast.AST]:
    """The functions that run now, all functions that they name, directly or not, and special methods."""
    known: dict[str, list[ast.AST]] = {}
    for _, tree in user_trees():
        for node in nodes_in(tree):
            if isinstance(node, FUNCTIONS):
                known.setdefault(node.name, []).append(node)
    pending = [each for name, found in known.items() if name.startswith("__") or name == "forward" for each in found]
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            script = syntax_tree(code.co_filename)
            running = script if is_module(code) else function_of(script, code)
            pending += [running] if running is not None else []
        frame = frame.f_back
    seen: set[ast.AST] = set()
    while pending and len(seen) < _MAX_FUNCTIONS:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        yield function
        for node in own_nodes(function):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            pending += known.get(name, ())


def thrown_away(function: ast.AST) -> Iterator[tuple[ast.Expr | ast.Assign, str]]:
    """The statements of a function whose new values nobody gets, and what computes them."""
    for node in own_nodes(function):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name)) as call) if name in _UNMISTAKABLE:
                if not any(given.arg in ("out", None) for given in call.keywords) and _is_kept(function, node):
                    yield node, name
            case ast.For():
                yield from _rebound(function, node)


def _operand(statement: ast.AST) -> str:
    """The source of the tensor that a call is made on; empty where that is a value which nobody else can have."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=module)), args=[operand, *_])) if (
            module in _MODULES
        ):
            part = operand
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=operand))):
            part = operand
        case _:
            return ""
    while True:
        match part:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                part = inner
            case ast.Call(func=ast.Attribute(value=inner, attr="detach")):
                part = inner
            case _:
                return ast.unparse(operand) if isinstance(part, ast.Name) else ""


def _is_kept(function: ast.AST, statement: ast.Expr) -> bool:
    """Whether somebody may read the operand of a call at another place, and the call is not all that is tried."""
    operand = _operand(statement)
    if any(isinstance(node, ast.Try) and node.body == [statement] for node in own_nodes(function)):
        return False
    own = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == operand]
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == operand]
    is_made_here = any(isinstance(node.ctx, ast.Store) for node in nodes)
    return bool(operand) and not (is_made_here and all(node in own for node in nodes if isinstance(node.ctx, ast.Load)))


def _is_other(file: str, operand: str, variables: list[tuple[str, str, Any]]) -> bool:
    """Whether a variable or an attribute is known to be something else than a tensor."""
    first, *attributes = operand.split(".")
    known = [value for where, name, value in variables if (where, name) == (file, first)]
    for attribute in attributes:
        known = [getattr(value, "__dict__", {}).get(attribute) for value in known]
    return any(value is not None and not isinstance(value, torch.Tensor) for value in known)


def _rebound(function: ast.AST, loop: ast.For) -> Iterator[tuple[ast.Assign, str]]:
    names = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    is_over_parameters = any(map(_gives_parameters, ast.walk(loop.iter)))
    for node in (each for statement in loop.body for each in ast.walk(statement)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names:
                if not (is_over_parameters or _reads_gradient(value, name)):
                    continue
                if _is_new_value(value, name) and not _is_read(function, loop, node, name):
                    yield node, name


def _gives_parameters(node: ast.AST) -> bool:
    """`model.parameters()`, or `group["params"]` of an optimizer."""
    match node:
        case ast.Subscript(slice=ast.Constant(value="params")):
            return True
        case ast.Call():
            return callee(node) in _PARAMETERS
    return False


def _reads_gradient(value: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Attribute) and ast.unparse(each) == f"{name}.grad" for each in ast.walk(value))


def _is_new_value(value: ast.expr, name: str) -> bool:
    """Whether an expression computes new values from a variable, and certainly writes to nothing."""
    calls = [each for each in ast.walk(value) if isinstance(each, ast.Call)]
    is_pure = all(_is_pure(call) for call in calls)
    changes = any(isinstance(each, ast.BinOp) for each in ast.walk(value))
    changes |= any(callee(call) in _UNMISTAKABLE | {"add", "sub", "mul", "div"} for call in calls)
    return is_pure and changes and any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(value))


def _is_pure(call: ast.Call) -> bool:
    name = callee(call)
    if isinstance(call.func, ast.Name):
        return name in _NUMBERS
    is_known = hasattr(torch.Tensor, name) or hasattr(torch, name)
    return is_known and not name.endswith("_") and not any(given.arg in ("out", None) for given in call.keywords)


def _is_read(function: ast.AST, loop: ast.For, statement: ast.Assign, name: str) -> bool:
    """Whether anything behind a statement may read a name. Another loop that sets the name begins anew."""
    others = [
        each
        for each in own_nodes(function)
        if isinstance(each, ast.For | ast.comprehension) and each is not loop
        if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(each.target))
    ]
    inner = [node for node in own_nodes(loop) if isinstance(node, LOOPS) and has_line(node, statement.lineno)]
    own = set(ast.walk(statement))
    again = {part for node in inner for part in ast.walk(node)} - own  # read in the next turn
    elsewhere = {part for other in others for part in ast.walk(other)} | own
    closures = {part for node in ast.walk(function) if _takes(node, name, function) for part in ast.walk(node)}
    end = (statement.end_lineno or 0, statement.end_col_offset or 0)
    return any(
        node in again or node in closures or ((node.lineno, node.col_offset) >= end and node not in elsewhere)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    )


def _takes(node: ast.AST, name: str, around: ast.AST) -> bool:
    """Whether this is a function inside of another that takes a name from there."""
    if not isinstance(node, CALLABLES) or node is around:
        return False
    arguments = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    stored = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return name not in arguments | stored
