"""The loop over epochs around the running loop over batches, as the live frames show it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from torchmedic.source.syntax import has_line, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import looks_at_locals


class Epochs(NamedTuple):
    """A loop `for epoch in range(total)` that is in its round number `at`, counted from 0."""

    total: int
    at: int


def epochs_around(frame: FrameType | None) -> Epochs | None:
    """The second loop from the inside, where it counts up to a number that is in sight."""
    loops = _loops(frame)
    next(loops, None)  # over the batches
    outer = next(loops, None)
    if outer is None:
        return None
    loop, holder = outer
    match loop:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[limit])):
            total, at = _value(limit, holder), _variable(holder, name)
            if type(total) is int and type(at) is int and 0 <= at < total:
                return Epochs(total, at)
    return None


def _loops(frame: FrameType | None) -> Iterator[tuple[ast.For | ast.While, FrameType]]:
    """The loops of the user's running functions, innermost first."""
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            found = [
                node
                for node in nodes_in(syntax_tree(code.co_filename))
                if isinstance(node, ast.For | ast.While)
                and has_line(node, frame.f_lineno)
                and node.lineno >= code.co_firstlineno
            ]
            for node in sorted(found, key=lambda node: -node.lineno):
                yield node, frame
        frame = frame.f_back


def _value(node: ast.expr, frame: FrameType) -> Any:
    """What a number, a variable or an attribute of one is now, without running a line of the user's code."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _variable(frame, name)
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
            return getattr(_variable(frame, owner), "__dict__", {}).get(attribute)
    return None


def _variable(frame: FrameType, name: str) -> Any:
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_function and looks_at_locals(frame.f_code):
        return None  # there is one dict of locals per frame: reading it here would change the user's
    values = frame.f_locals
    found = values.get(name, frame.f_globals.get(name))
    if is_function and sys.version_info < (3, 13):
        values.clear()  # a copy kept by the frame, which would hold every tensor past its time
    return found
