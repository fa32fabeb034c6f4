"""Where a value came from: the statement that made it, followed upwards through live frames."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.records import Location, Role
from torchmedic.source.bindings import ENTRY, assignments, binds, header, own_statements, parameters
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.failing_call import UNKNOWN, Argument, Call, raising_call, read
from torchmedic.source.lookup.layer_construction import class_nodes, is_attribute_of, own_names
from torchmedic.source.lookup.safe_eval import mangled

CALLING = ("_wrapped_call_impl", "_call_impl", "inner")


class Origin:
    """The user's statement that gave a value its name, or the expression that made it."""

    def __init__(self, file: str, node: ast.AST, name: str, *, holds: bool = False) -> None:
        self.file = file
        self.node = node
        self.name = name
        self.holds = holds  # the name is that of a batch or an output of which the value is a part

    def location(self, role: Role, label: str) -> Location:
        return node_location(role, self.file, self.node, label)

    @property
    def value(self) -> ast.expr | None:
        """The expression whose result the value is, where it is one."""
        if isinstance(self.node, ast.Assign | ast.AnnAssign):
            return self.node.value
        return self.node if isinstance(self.node, ast.expr) else None


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
    """Follow a name to the assignment that made it, through the parameters of the user's functions.

    None where it cannot be told: more than one assignment may have been the last, or a caller is gone.
    """
    holds = False
    for _ in range(20):
        part, node = node, _holder(node, frame)
        holds = holds or node is not part
        if isinstance(node, ast.Attribute):
            return _attribute_origin(node, frame, holds)
        if not isinstance(node, ast.Name):
            return Origin(frame.file, node, ast.unparse(node), holds=holds) if node is not None else None
        name = node.id
        made = assignments(frame, name)
        if len(made) > 1 or (made and made[0] is ENTRY and name not in parameters(frame)):
            return None
        if made and made[0] is not ENTRY:
            return Origin(frame.file, header(made[0]), name, holds=holds)
        outer = _from_outside(frames, frame, name)
        if outer is None or isinstance(outer, Origin):
            return outer
        frame, node = outer
    return None


def _holder(node: ast.expr | None, frame: Frame) -> ast.expr | None:
    """From `batch["image"]` or `out.logits` to what holds the value; a part of a tensor is made where it is taken."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        owner = read(node.value, frame)
        if isinstance(owner, torch.Tensor):
            return node if isinstance(node, ast.Subscript) else node.value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return node
        node = node.value
    return node


def _from_outside(frames: list[Frame], frame: Frame, name: str) -> tuple[Frame, ast.expr] | Origin | None:
    """Where a name that this function does not assign comes from: its caller, an enclosing function, the module."""
    if name in parameters(frame):
        return _passed_by_caller(frames, frame, name)
    if name in frame.live.f_code.co_varnames:
        return None  # the loop variable of a comprehension
    before = frames[: frames.index(frame)] if frame in frames else frames
    enclosing = name in frame.live.f_code.co_freevars
    for outer in reversed(before):
        code = outer.live.f_code
        if outer.live.f_globals is not frame.live.f_globals:
            continue
        if (enclosing and name in code.co_cellvars) or (not enclosing and outer.function == "<module>"):
            return outer, ast.Name(name, ast.Load())
    if enclosing:
        return None
    tree = frame.tree
    made = [statement for statement in own_statements(tree) if binds(statement, name)] if tree is not None else []
    return Origin(frame.file, header(made[0]), name) if len(made) == 1 else None


def _passed_by_caller(frames: list[Frame], frame: Frame, name: str) -> tuple[Frame, ast.expr] | None:
    """The expression that the calling user frame passed for a parameter, checked by identity of the object."""
    value = frame.variables.get(name, UNKNOWN)
    position = frames.index(frame)
    between: list[Frame] = []
    for outer in reversed(frames[:position]):
        if not outer.is_user:
            between.append(outer)
            continue
        call = raising_call(outer)
        if call is None:
            return None
        for argument in call.arguments:
            if argument.value is value and argument.node is not None:
                return outer, argument.node
        direct = all(part.function in CALLING and part.module is not None for part in between)
        return _by_position(call, outer, frame, name) if direct else None
    return None


def _by_position(call: Call, outer: Frame, frame: Frame, name: str) -> tuple[Frame, ast.expr] | None:
    """A parameter whose argument could not be read, such as `model(make_input())`, by its place in the call."""
    code = frame.live.f_code
    own = list(code.co_varnames[: code.co_argcount])
    if own and own[0] in ("self", "cls"):
        own = own[1:]
    if name not in own or not call.whole:
        return None
    found = call.argument(own.index(name) + call.bound, name)
    if found is None or found.value is not UNKNOWN or found.node is None:
        return None
    return outer, found.node


def _attribute_origin(node: ast.Attribute, frame: Frame, holds: bool) -> Origin | None:
    """`self.x`: the only place in its class that assigns or registers it."""
    owner = read(node.value, frame)
    if owner is UNKNOWN:
        return None
    attr = mangled(node.attr, frame)
    found = list(attribute_assignments(type(owner), attr)) or list(attribute_assignments(type(owner), node.attr))
    return Origin(found[0][0], found[0][1], ast.unparse(node), holds=holds) if len(found) == 1 else None


def attribute_assignments(kind: type, attr: str) -> Iterator[tuple[str, ast.stmt]]:
    """Every statement of a class and its bases that assigns `self.attr` or registers it as buffer or parameter."""
    for file, body in class_nodes(kind):
        own = own_names(body)
        for statement in ast.walk(body):
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                targets = [statement.target]
            elif isinstance(statement, ast.Expr) and _registers(statement.value, attr, own):
                yield file, statement
            if any(is_attribute_of(part, attr, own) for target in targets for part in ast.walk(target)):
                assert isinstance(statement, ast.stmt)
                yield file, statement


def _registers(node: ast.expr, attr: str, names: frozenset[str]) -> bool:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=owner), attr="register_buffer" | "register_parameter" | "add_module"),
            args=[ast.Constant(value=own), *_],
        ):
            return owner in names and bool(own == attr)
    return False
