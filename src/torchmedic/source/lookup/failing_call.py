"""Which operation raised, and with which arguments: read off the syntax and the variables of a live frame.

An operation of torch is C++ and leaves no frame of its own. But the innermost Python frame was evaluating exactly one
expression, whose operands are mostly plain names. They are looked up, never recomputed where that could change
anything (see `safe_eval`). Parameters that a function has overwritten since are read from the frame that called it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.safe_eval import OPERATORS, UNKNOWN, read
from torchmedic.source.syntax import callee

_UNARY = {ast.USub: "neg", ast.Invert: "bitwise_not", ast.Not: "not"}
_DUNDER = re.compile(r"__(i|r)?(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lt|le|gt|ge|eq|ne)__")
_NAMES = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}


class Argument:
    """One argument of the raising call: the expression, where it stands, and its value if it could be read."""

    def __init__(self, node: ast.expr | None, value: Any, name: str = "") -> None:
        self.node = node
        self.value = value
        self.name = name

    @property
    def text(self) -> str:
        return ast.unparse(self.node) if self.node is not None else self.name

    @property
    def tensor(self) -> torch.Tensor | None:
        """The value if it is a tensor with one shape: nested ones have several, uninitialised ones none."""
        value = self.value
        return value if isinstance(value, torch.Tensor) and not is_lazy(value) and not value.is_nested else None


class Call:
    """An operation and its arguments, in order; keyword arguments come last and carry their name.

    `whole` says that every argument of the call is listed, though the value of one may be UNKNOWN. `bound` says that
    the first one is the object whose method was called.
    """

    def __init__(
        self,
        frame: Frame,
        op: str,
        function: Any,
        arguments: list[Argument],
        *,
        whole: bool = True,
        bound: bool = False,
    ) -> None:
        self.frame = frame
        self.op = op
        self.function = function
        self.arguments = arguments
        self.whole = whole
        self.bound = bound

    @property
    def tensors(self) -> list[Argument]:
        """The arguments that are tensors; those in a list or tuple (as `cat` takes) one by one."""
        return [argument for argument in self.flat() if argument.tensor is not None]

    @property
    def is_known(self) -> bool:
        """Whether the value of every argument could be read."""
        return self.whole and all(argument.value is not UNKNOWN for argument in self.arguments)

    def flat(self) -> Iterator[Argument]:
        """The arguments, with lists and tuples taken apart."""
        for argument in self.arguments:
            parts = argument.node.elts if isinstance(argument.node, ast.List | ast.Tuple) else []
            if isinstance(argument.value, list | tuple):
                nodes: list[ast.expr | None] = [None] * len(argument.value)
                if len(parts) == len(nodes) and not any(isinstance(part, ast.Starred) for part in parts):
                    nodes = list(parts)
                for position, (node, value) in enumerate(zip(nodes, argument.value, strict=True)):
                    yield Argument(node, value, f"{argument.text}[{position}]")
            elif argument.value is UNKNOWN and parts:
                # One unreadable member does not hide the others.
                for part in parts:
                    yield Argument(part, read(part, self.frame))
            else:
                yield argument

    def get(self, position: int, name: str) -> Any:
        """An argument by keyword or position; UNKNOWN if it was not given or could not be read."""
        found = self.argument(position, name)
        return UNKNOWN if found is None else found.value

    def argument(self, position: int, name: str) -> Argument | None:
        """An argument by keyword or position."""
        for argument in self.arguments:
            if argument.name == name:
                return argument
        positional = [argument for argument in self.arguments if not argument.name]
        return positional[position] if self.whole and position < len(positional) else None


def raising_call(frame: Frame) -> Call | None:
    """The operation that a frame was evaluating when it raised."""
    node: Any = frame.node
    if isinstance(node, ast.Await):
        node = node.value
    match node:
        case ast.Call():
            return _call(frame, node)
        case ast.BinOp(left=left, op=op, right=right):
            return _operation(frame, operator_name(op), left, right)
        case ast.UnaryOp(op=op, operand=operand):
            return _operation(frame, _UNARY.get(type(op), type(op).__name__), operand)
        case ast.Compare(left=left, comparators=others):
            return _operation(frame, "compare", left, *others)
        case ast.Subscript(value=owner, slice=index, ctx=ast.Load()):
            return _operation(frame, "index", owner, index)
        case ast.Subscript(value=owner, slice=index, ctx=ast.Store()):
            return _stored(frame, owner, index)
    statement = frame.statement
    if isinstance(statement, ast.AugAssign) and statement.lineno == frame.line and node is None:
        return _operation(frame, operator_name(statement.op) + "_", statement.target, statement.value)
    return None


def operator_name(op: ast.AST) -> str:
    return OPERATORS[type(op)][0] if type(op) in OPERATORS else type(op).__name__


def _operation(frame: Frame, op: str, *operands: ast.expr) -> Call:
    return Call(frame, op, None, [Argument(operand, read(operand, frame)) for operand in operands])


def _stored(frame: Frame, owner: ast.expr, index: ast.expr) -> Call:
    """`owner[index] = value`."""
    statement = frame.statement
    if isinstance(statement, ast.Assign) and any(target is frame.node for target in statement.targets):
        return _operation(frame, "index_put_", owner, index, statement.value)
    return Call(frame, "index_put_", None, [Argument(part, read(part, frame)) for part in (owner, index)], whole=False)


def _call(frame: Frame, node: ast.Call) -> Call:
    function = read(node.func, frame)
    op = getattr(function, "__name__", "") if function is not UNKNOWN else ""
    if isinstance(function, torch.nn.Module):
        op = type(function).__name__  # a module in a variable called `cat` is not `torch.cat`
    if not isinstance(op, str) or not op or op.startswith("<"):
        op = callee(node)
    if special := _DUNDER.fullmatch(op):
        op = _NAMES.get(special[2], special[2]) + ("_" if special[1] == "i" else "")
    if op == "index":
        op = "index_of"  # of a list; `index` is what square brackets do
    arguments = []
    whole = True
    bound = False
    if isinstance(node.func, ast.Attribute):
        owner = read(node.func.value, frame)
        # What cannot be read is no module such as `torch`: so this is a method, and most likely of a tensor.
        bound = owner is UNKNOWN or isinstance(owner, torch.Tensor)
        if bound:
            arguments.append(Argument(node.func.value, owner))
    for part in node.args:
        if isinstance(part, ast.Starred):
            values = read(part.value, frame)
            if isinstance(values, list | tuple):
                arguments.extend(Argument(None, value) for value in values)
            else:
                whole = False
            continue
        arguments.append(Argument(part, read(part, frame)))
    for keyword in node.keywords:
        value = read(keyword.value, frame)
        if keyword.arg is not None:
            arguments.append(Argument(keyword.value, value, keyword.arg))
        elif isinstance(value, dict):
            arguments.extend(Argument(None, item, str(key)) for key, item in value.items())
        else:
            whole = False
    return Call(frame, op, function, arguments, whole=whole, bound=bound)


__all__ = ["UNKNOWN", "Argument", "Call", "operator_name", "raising_call", "read"]


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
