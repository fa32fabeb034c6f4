"""Where a value came from: the statement that made it, followed upwards through live frames."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.records import Location, Role
from torchmedic.replay.calls import UNKNOWN, Argument, Call, raising_call, read
from torchmedic.replay.frames import Frame, node_location, syntax_tree


class Origin:
    """The user's statement that gave a value its name, and the expression that stands for it there."""

    def __init__(self, frame: Frame, node: ast.AST, name: str) -> None:
        self.frame = frame
        self.node = node
        self.name = name

    def location(self, role: Role, label: str) -> Location:
        return node_location(role, self.frame.file, self.node, label)

    @property
    def is_loop_header(self) -> bool:
        return isinstance(self.node, ast.expr)


def user_argument(frames: list[Frame], value: Any) -> tuple[Frame, Argument] | None:
    """The innermost expression of the user's own code that passed exactly this object on."""
    for frame in reversed(frames):
        if not frame.is_user:
            continue
        call = raising_call(frame)
        for argument in (*call.arguments, *call.tensors) if call is not None else ():
            if argument.value is value and argument.node is not None:
                return frame, argument
        return None
    return None


def origin_of(frames: list[Frame], frame: Frame, node: ast.expr | None) -> Origin | None:
    """Follow a name to the assignment that made it, through the parameters of the user's functions."""
    for _ in range(20):
        name = _root_name(node)
        if name is None:
            return None
        made = assignment_before(frame, name)
        if made is not None:
            return Origin(frame, made, name)
        outer = _passed_by_caller(frames, frame, name)
        if outer is None:
            return None
        frame, node = outer
    return None


def _root_name(node: ast.expr | None) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def function_body(frame: Frame) -> ast.AST | None:
    """The syntax of the function (or module) that a frame runs."""
    tree = syntax_tree(frame.file, frame.live.f_globals)
    if tree is None or frame.function == "<module>":
        return tree
    first = frame.live.f_code.co_firstlineno
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == frame.function:
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if start == first:
                return node
    return None


def own_statements(body: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function itself, not those of functions and classes inside it."""
    for child in ast.iter_child_nodes(body):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from own_statements(child)


def assignment_before(frame: Frame, name: str) -> ast.AST | None:
    """The last binding of a name before the line that a frame is at; a loop header counts as one."""
    body = function_body(frame)
    if body is None:
        return None
    found: ast.AST | None = None
    for statement in own_statements(body):
        if statement.lineno > frame.line or (_contains(statement, frame) and not _is_loop(statement)):
            continue
        if _binds(statement, name):
            candidate: ast.AST = statement
            if isinstance(statement, ast.For | ast.AsyncFor):
                candidate = statement.iter
            if found is None or candidate.lineno >= found.lineno:  # type: ignore[attr-defined]
                found = candidate
    return found


def _is_loop(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.For | ast.AsyncFor)


def _contains(statement: ast.stmt, frame: Frame) -> bool:
    return statement.lineno <= frame.line <= (statement.end_lineno or statement.lineno)


def _binds(statement: ast.stmt, name: str) -> bool:
    targets: list[ast.expr]
    match statement:
        case ast.Assign(targets=found):
            targets = found
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            targets = [target]
        case ast.For(target=target) | ast.AsyncFor(target=target):
            targets = [target]
        case ast.With(items=items) | ast.AsyncWith(items=items):
            targets = [item.optional_vars for item in items if item.optional_vars is not None]
        case _:
            return False
    return any(isinstance(part, ast.Name) and part.id == name for target in targets for part in ast.walk(target))


def _passed_by_caller(frames: list[Frame], frame: Frame, name: str) -> tuple[Frame, ast.expr] | None:
    """The expression that the calling user frame passed for a parameter, checked by identity of the object."""
    value = frame.variables.get(name, UNKNOWN)
    position = frames.index(frame)
    for outer in reversed(frames[:position]):
        if not outer.is_user:
            continue
        call = raising_call(outer)
        if call is None:
            return None
        for argument in call.arguments:
            if argument.value is value and argument.node is not None:
                return outer, argument.node
        return None
    return None


def module_path(frames: list[Frame], module: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
    """The user's module that owns another one, and the dotted name below it: `(net, "features.3")`."""
    for frame in reversed(frames):
        owner = frame.module
        if owner is None or owner is module or not frame.is_user:
            continue
        for name, child in owner.named_modules():
            if child is module and name:
                return owner, name
    return None


def built_at(frames: list[Frame], module: torch.nn.Module, label: str) -> Location | None:
    """The line on which a layer was built: the call inside `self.name = ...` of its owner's class, or a variable."""
    owned = module_path(frames, module)
    if owned is not None:
        owner, path = owned
        node = _built_in_class(type(owner), path)
        if node is not None:
            return node_location("origin", node[0], node[1], label)
    for frame in reversed(frames):
        if not frame.is_user:
            continue
        for name, value in {**frame.live.f_globals, **frame.variables}.items():
            found = _path_below(value, module)
            if found is None:
                continue
            body = syntax_tree(frame.file, frame.live.f_globals)
            for statement in own_statements(body) if body is not None else ():
                if isinstance(statement, ast.Assign) and _binds(statement, name):
                    call = _descend(statement.value, [part for part in found.split(".") if part])
                    if call is not None:
                        return node_location("origin", frame.file, call, label)
    return None


def _path_below(value: Any, module: torch.nn.Module) -> str | None:
    if value is module:
        return ""
    if isinstance(value, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
        return next((name for name, child in value.named_modules() if child is module), None)
    return None


def _built_in_class(owner: type, path: str) -> tuple[str, ast.expr] | None:
    head, *rest = path.split(".")
    for kind in owner.__mro__:
        if kind in (torch.nn.Module, object):
            break
        file = inspect.getsourcefile(kind)
        tree = syntax_tree(file) if file and linecache.getlines(file) else None
        for node in ast.walk(tree) if tree is not None else ():
            if not (isinstance(node, ast.ClassDef) and node.name == kind.__name__):
                continue
            for statement in ast.walk(node):
                if isinstance(statement, ast.Assign) and any(
                    isinstance(target, ast.Attribute)
                    and target.attr == head
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                    for target in statement.targets
                ):
                    found = _descend(statement.value, rest)
                    if found is not None and file is not None:
                        return file, found
    return None


def _descend(node: ast.expr, path: list[str]) -> ast.expr | None:
    """From `nn.Sequential(a, b, c)` and `["1"]` to the expression of `b`."""
    for part in path:
        arguments: list[ast.expr] = node.args if isinstance(node, ast.Call) else []
        if len(arguments) == 1 and isinstance(arguments[0], ast.List | ast.Tuple):
            arguments = arguments[0].elts
        if not part.isdigit() or any(isinstance(item, ast.Starred) for item in arguments):
            return node
        if int(part) >= len(arguments):
            return node
        node = arguments[int(part)]
    return node


__all__ = ["Call", "Origin", "built_at", "module_path", "origin_of", "read", "user_argument"]
