"""Statements that compute new values and throw them away: `ids.masked_fill(chosen, 0)`, `p = p.clamp(0, 1)`.

An operation of torch's without a trailing underscore changes nothing: it returns a new tensor. As a statement of its
own it has no effect. Neither has an assignment to the variable of a loop over parameters that nothing reads afterwards:
the name gets another value, the parameter stays as it is. Only functions that the running code names are looked at.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from types import FrameType

import torch

from torchmedic.detect.loop.incident import LoopIncident, ResultThrownAway
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, callee, function_of, is_module, nodes_in, own_nodes, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import user_trees

_MIN_STEPS = 6
_MAX_FUNCTIONS = 400
# Operations that have a twin which writes in place, and whose names nothing but tensors knows: a plot has `scatter`.
_UNMISTAKABLE = frozenset(
    "masked_fill masked_scatter clamp clamp_min clamp_max index_fill index_copy index_add scatter_add "
    "tril triu lerp addcmul addcdiv".split()
)
_PARAMETERS = frozenset("parameters named_parameters buffers named_buffers".split())
_NUMBERS = frozenset("float int abs min max len".split())


def find(habits: Habits) -> Iterator[LoopIncident]:
    if habits.steps < _MIN_STEPS:
        return
    found = [(file, *each) for file, tree in user_trees() for each in _in_file(tree)]
    running = set(_functions()) if found else set()
    own = {function.name for function in running if isinstance(function, FUNCTIONS)}
    for file, function, statement, what in found:
        if function in running and what not in own:
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
    return tuple((function, *each) for function in functions for each in thrown_away(function))


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
                if not any(given.arg in ("out", None) for given in call.keywords):
                    yield node, name
            case ast.For(iter=iterable) if any(
                isinstance(each, ast.Call) and callee(each) in _PARAMETERS for each in ast.walk(iterable)
            ):
                yield from _rebound(function, node)


def _rebound(function: ast.AST, loop: ast.For) -> Iterator[tuple[ast.Assign, str]]:
    names = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    for node in (each for statement in loop.body for each in ast.walk(statement)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names:
                if _is_new_value(value, name) and not _is_read(function, loop, node, name):
                    yield node, name


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
    elsewhere = {id(part) for other in others for part in ast.walk(other)}
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and node.lineno > (statement.end_lineno or statement.lineno)
        and id(node) not in elsewhere
        for node in ast.walk(function)
    )
