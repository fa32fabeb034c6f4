"""Which statement of the user's gave a tensor the bad values that the step found in it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.records import Location, Role
from torchmedic.source.bindings import ENTRY, assignments, function_body, header, own_statements
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.origins import attribute_assignments
from torchmedic.source.objects.finite import is_bad
from torchmedic.source.objects.parts import attributes
from torchmedic.source.syntax import FUNCTIONS

_MAX_DEPTH = 4  # assignments that are followed back


class Maker(NamedTuple):
    """A statement, and what it gave its values to."""

    file: str
    node: ast.AST
    name: str
    writes: bool = False  # into a tensor that was made before

    def location(self, role: Role, label: str) -> Location:
        return node_location(role, self.file, self.node, label)


def maker_of(frames: list[Frame], tensor: torch.Tensor, extra: list[Any]) -> Maker | None:
    """Look for the tensor in the variables of the user's frames, then in what their objects hold.

    Args:
        frames: Live ones, outermost first.
        tensor: What is looked for, by its memory.
        extra: Objects to look into as well, such as datasets.
    """
    for frame in reversed(frames):
        if not frame.is_user:
            continue
        for name, value in list(frame.variables.items()):
            if shares_memory(value, tensor):
                found = _variable(frame, name, _MAX_DEPTH)
                if found is not None:
                    return found
        if frame.live.f_globals is not frame.live.f_locals:
            for name, value in list(frame.live.f_globals.items()):
                if shares_memory(value, tensor):
                    found = _global(frame, name)
                    if found is not None:
                        return found
    for owner in _objects(frames, extra):
        for attr, value in attributes(owner, type(owner)):
            if shares_memory(value, tensor):
                found = _attribute(owner, attr)
                if found is not None:
                    return found
    return None


def shares_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor or an array is stored where the other one is."""
    try:
        if isinstance(value, torch.Tensor):
            return bool(value.untyped_storage()._cdata == tensor.untyped_storage()._cdata)
        interface = getattr(value, "__array_interface__", None)
        if isinstance(interface, dict):
            start = interface["data"][0]
            memory = tensor.untyped_storage()
            return bool(start and memory.data_ptr() <= start < memory.data_ptr() + max(1, memory.nbytes()))
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return False
    return False


def _objects(frames: list[Frame], extra: list[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    values = [value for frame in reversed(frames) if frame.is_user for value in frame.variables.values()]
    for value in [*extra, *values]:
        if id(value) in seen or inspect.ismodule(value) or isinstance(value, type | torch.Tensor | dict):
            continue
        seen.add(id(value))
        yield value


def _attribute(owner: Any, attr: str) -> Maker | None:
    found = list(attribute_assignments(type(owner), attr))
    return Maker(found[-1][0], found[-1][1], f"self.{attr}") if found else None


def _variable(frame: Frame, name: str, depth: int) -> Maker | None:
    """The statement of a frame's own function that made a variable bad: its assignment, or a write into it."""
    body = function_body(frame)
    bound = [node for node in assignments(frame, name) if node is not ENTRY]
    if not isinstance(body, FUNCTIONS | ast.Module):
        return None
    first = min((getattr(node, "lineno", 0) for node in bound), default=0)
    return _decide(frame, name, bound, _writes(body, name, first, frame.line), depth)


def _global(frame: Frame, name: str) -> Maker | None:
    """The statement that made a variable of the frame's module bad."""
    if frame.tree is None:
        return None
    bound: list[ast.AST] = [
        statement
        for statement in own_statements(frame.tree)
        if any(isinstance(part, ast.Name) and part.id == name for part in _targets(statement))
    ]
    return _decide(frame, name, bound, _writes(frame.tree, name, 0, 1 << 30), _MAX_DEPTH)


def _decide(frame: Frame, name: str, bound: list[ast.AST], writes: list[ast.stmt], depth: int) -> Maker | None:
    spelled = [statement for statement in writes if _spells_it(statement)]
    if spelled:
        return Maker(frame.file, spelled[0], name, True)
    for node in reversed(bound):
        older = _older(frame, node, name, depth) if depth else None
        if older is not None:
            return older
    risky = [statement for statement in writes if _is_risky(statement)]
    if risky:
        return Maker(frame.file, risky[-1], name, True)
    return Maker(frame.file, header(bound[-1]), name) if bound else None


def _older(frame: Frame, node: ast.AST, name: str, depth: int) -> Maker | None:
    """An operand of the assignment that is bad already."""
    value = getattr(node, "value", None)
    if not isinstance(value, ast.expr):
        return None
    for part in ast.walk(value):
        if isinstance(part, ast.Name) and part.id != name:
            given = frame.variables.get(part.id, frame.live.f_globals.get(part.id))
            is_array = isinstance(given, torch.Tensor) or hasattr(given, "__array_interface__")
            if is_array and is_bad(given):
                found = _variable(frame, part.id, depth - 1)
                if found is None and part.id in frame.live.f_globals:
                    found = _global(frame, part.id)
                return found
    return None


def _targets(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.Assign(targets=targets):
            return [part for target in targets for part in _flat(target)]
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return [target]
    return []


def _flat(target: ast.expr) -> list[ast.expr]:
    return [part for item in target.elts for part in _flat(item)] if isinstance(target, ast.Tuple) else [target]


def _writes(body: ast.AST, name: str, after: int, before: int) -> list[ast.stmt]:
    """Statements that write into what a name holds."""
    found = []
    for statement in own_statements(body):
        if not after <= statement.lineno < before:
            continue
        for target in _targets(statement):
            if (
                not (isinstance(target, ast.Name) and not isinstance(statement, ast.AugAssign))
                and _root(target) == name
            ):
                found.append(statement)
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attr) as function)):
                if attr.endswith("_") and not attr.endswith("__") and _root(function.value) == name:
                    found.append(statement)
    return found


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _spells_it(statement: ast.stmt) -> bool:
    """Whether NaN or infinity is written out."""
    text = ast.unparse(statement).lower().replace('"', "'")
    return any(word in text for word in ("'nan'", "'inf'", "'-inf'", ".nan", ".inf", "'infinity'"))


def _is_risky(statement: ast.stmt) -> bool:
    text = ast.unparse(statement)
    return any(word in text for word in ("/", "log", "sqrt", "**", "exp", "div", "std", "norm"))
