"""What a function was called with, where it has since overwritten or deleted its parameters."""

from __future__ import annotations

import ast
from types import CodeType, FrameType
from typing import Any

from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import UNKNOWN, raising_call


def lost_arguments(frame: FrameType, statements: list[ast.stmt]) -> dict[str, Any]:
    """The original values of parameters that the function no longer holds as they came in.

    Read from the expression with which the caller, which is still alive, called it.
    """
    code = frame.f_code
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    changed = {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    wanted = {name for name in parameters if name in changed or name not in frame.f_locals}
    if not wanted or frame.f_back is None:
        return {}
    outer = Frame(frame.f_back, frame.f_back.f_lasti, frame.f_back.f_lineno)
    call = raising_call(outer)
    if call is None:
        return {}
    positional = [argument.value for argument in call.arguments if not argument.name]
    named = {argument.name: argument.value for argument in call.arguments if argument.name}
    names = list(parameters[: code.co_argcount])
    if names and _is_bound(frame, code, positional):
        names = names[1:]
    given = {**dict(zip(names, positional, strict=False)), **named}
    return {name: given[name] for name in wanted if given.get(name, UNKNOWN) is not UNKNOWN}


def _is_bound(frame: FrameType, code: CodeType, positional: list[Any]) -> bool:
    """Whether the first parameter is `self`, which the caller does not write down."""
    first = frame.f_locals.get(code.co_varnames[0])
    return not (positional and positional[0] is first) and code.co_varnames[0] in ("self", "cls")
