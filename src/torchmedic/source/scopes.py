"""The function that a live frame runs, and which of its statements gave a name the value that it has there."""

from __future__ import annotations

import ast
import inspect

from torchmedic.source.bindings import ENTRY, reaching
from torchmedic.source.live_frames import Frame
from torchmedic.source.syntax import FUNCTIONS, first_line


def function_body(frame: Frame) -> ast.AST | None:
    """The syntax of the function or module that a frame runs; None for lambdas and comprehensions."""
    tree = frame.tree
    if tree is None or frame.function == "<module>":
        return tree
    first = frame.live.f_code.co_firstlineno
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.name == frame.function and first_line(node) == first:
            return node
    return None


def parameters(frame: Frame) -> frozenset[str]:
    code = frame.live.f_code
    starred = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + starred])


def assignments(frame: Frame, name: str) -> list[ast.AST]:
    """Every statement of the frame's own function that may have given a name its value; ENTRY for a parameter."""
    body = function_body(frame)
    if body is None:
        return [ENTRY] if name in parameters(frame) else []
    if frame.statement is None or not isinstance(body, FUNCTIONS | ast.Module):
        return []
    found = reaching(body.body, name, frame.statement)
    if found == {ENTRY} and name not in parameters(frame):
        return []
    return sorted(found, key=lambda node: getattr(node, "lineno", 0))


def assignment_before(frame: Frame, name: str) -> ast.AST | None:
    """The statement that gave a name its value at the line that a frame is at; a loop header counts as one."""
    found = [node for node in assignments(frame, name) if node is not ENTRY]
    return header(found[0]) if len(found) == 1 else None


def header(statement: ast.AST) -> ast.AST:
    """The node that stands for a binding in a report: of a loop, the expression that it goes over."""
    return statement.iter if isinstance(statement, ast.For | ast.AsyncFor) else statement
