"""Which operation raised, and with which arguments: read off the syntax and the variables of a live frame.

An operation of torch is C++ and leaves no frame of its own. But the innermost Python frame was evaluating exactly one
expression, whose operands are mostly plain names. They are looked up, never recomputed where that could change
anything: only names, attributes, items, constants and pure tensor methods are evaluated.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any, Final

import torch

from torchmedic.replay.frames import Frame


class _Unknown:
    def __repr__(self) -> str:
        return "<not known>"


UNKNOWN: Final = _Unknown()

# Methods and functions of torch that only look: same inputs, same result, nothing changed.
_PURE = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze transpose permute t mT contiguous float double half bfloat16 "
    "long int bool to type_as detach clone expand expand_as repeat size dim numel mean sum softmax log_softmax argmax "
    "sigmoid tanh relu abs neg exp log sqrt chunk split unbind cat stack concat narrow select movedim swapaxes "
    "view_as reshape_as ndimension new_zeros new_ones zeros_like ones_like zeros ones cpu item tolist max min "
    "clamp".split()
)
_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
}
_SMALL = 4_000_000  # elements: above this even a pure operation is not repeated


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
        return self.value if isinstance(self.value, torch.Tensor) else None


class Call:
    """An operation and its arguments, in order; keyword arguments come last and carry their name."""

    def __init__(self, frame: Frame, op: str, function: Any, arguments: list[Argument]) -> None:
        self.frame = frame
        self.op = op
        self.function = function
        self.arguments = arguments

    @property
    def tensors(self) -> list[Argument]:
        """The arguments that are tensors; those in a list or tuple (as `cat` takes) one by one."""
        return [argument for argument in self._flat() if argument.tensor is not None]

    def _flat(self) -> Iterator[Argument]:
        for argument in self.arguments:
            if isinstance(argument.value, list | tuple):
                nodes: list[ast.expr | None] = [None] * len(argument.value)
                if isinstance(argument.node, ast.List | ast.Tuple) and len(argument.node.elts) == len(nodes):
                    nodes = list(argument.node.elts)
                for position, (node, value) in enumerate(zip(nodes, argument.value, strict=True)):
                    yield Argument(node, value, f"{argument.text}[{position}]")
            else:
                yield argument

    def get(self, position: int, name: str) -> Any:
        """An argument by keyword or position; UNKNOWN if it was not given or could not be read."""
        for argument in self.arguments:
            if argument.name == name:
                return argument.value
        positional = [argument for argument in self.arguments if not argument.name]
        return positional[position].value if position < len(positional) else UNKNOWN


def raising_call(frame: Frame) -> Call | None:
    """The operation that a frame was evaluating when it raised."""
    node = frame.node
    if isinstance(node, ast.Await):
        node = node.value
    if isinstance(node, ast.Call):
        return _call(frame, node)
    if isinstance(node, ast.BinOp):
        return Call(
            frame,
            _OPERATORS.get(type(node.op), type(node.op).__name__),
            None,
            [Argument(side, read(side, frame)) for side in (node.left, node.right)],
        )
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return Call(frame, "compare", None, [Argument(side, read(side, frame)) for side in sides])
    if isinstance(node, ast.Subscript):
        return Call(
            frame,
            "index",
            None,
            [Argument(part, read(part, frame)) for part in (node.value, node.slice)],
        )
    return _augmented(frame)


def _augmented(frame: Frame) -> Call | None:
    """`a += b` is a statement, so no expression has its span."""
    from torchmedic.replay.frames import syntax_tree

    tree = syntax_tree(frame.file, frame.live.f_globals)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.AugAssign) and node.lineno == frame.line:
            return Call(
                frame,
                _OPERATORS.get(type(node.op), type(node.op).__name__) + "_",
                None,
                [Argument(side, read(side, frame)) for side in (node.target, node.value)],
            )
    return None


def _call(frame: Frame, node: ast.Call) -> Call:
    function = read(node.func, frame)
    op = getattr(function, "__name__", "") if function is not UNKNOWN else ""
    if not op or op == "<lambda>":
        op = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    arguments = []
    if isinstance(node.func, ast.Attribute) and isinstance(owner := read(node.func.value, frame), torch.Tensor):
        arguments.append(Argument(node.func.value, owner))
    for part in node.args:
        if isinstance(part, ast.Starred):
            values = read(part.value, frame)
            if isinstance(values, list | tuple):
                arguments.extend(Argument(None, value) for value in values)
            continue
        arguments.append(Argument(part, read(part, frame)))
    for keyword in node.keywords:
        value = read(keyword.value, frame)
        if keyword.arg is not None:
            arguments.append(Argument(keyword.value, value, keyword.arg))
        elif isinstance(value, dict):
            arguments.extend(Argument(None, item, str(key)) for key, item in value.items())
    return Call(frame, op, function, arguments)


def read(node: ast.expr, frame: Frame) -> Any:
    """The value of an expression if it can be had without side effects, else UNKNOWN."""
    try:
        with torch.no_grad():
            return _read(node, frame)
    except Exception:  # whatever the user's objects do when they are looked at
        return UNKNOWN


def _read(node: ast.expr, frame: Frame) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return frame.lookup(name)
        case ast.Attribute(value=owner, attr=attr):
            return _attribute(_known(owner, frame), _mangled(attr, frame))
        case ast.Tuple(elts=items) | ast.List(elts=items):
            values = [_known(item, frame) for item in items]
            return tuple(values) if isinstance(node, ast.Tuple) else values
        case ast.Subscript(value=owner, slice=index):
            return _item(_known(owner, frame), _known(index, frame))
        case ast.Slice(lower=lower, upper=upper, step=step):
            return slice(*(None if part is None else _known(part, frame) for part in (lower, upper, step)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_bounded(_known(operand, frame))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            sides = [_bounded(_known(side, frame)) for side in (left, right)]
            if not all(isinstance(side, torch.Tensor | int | float) for side in sides):
                return UNKNOWN
            return eval(
                compile(
                    ast.fix_missing_locations(
                        ast.Expression(ast.BinOp(ast.Name("a", ast.Load()), op, ast.Name("b", ast.Load())))
                    ),
                    "<operand>",
                    "eval",
                ),
                {"a": sides[0], "b": sides[1]},
            )
        case ast.Call(func=ast.Attribute(value=owner, attr=attr), args=args, keywords=keywords) if attr in _PURE:
            target = _known(owner, frame)
            if not (isinstance(target, torch.Tensor) or target in (torch, torch.nn.functional)):
                return UNKNOWN
            function = getattr(_bounded(target), attr)
            return function(
                *(_bounded(_known(part, frame)) for part in args),
                **{part.arg: _known(part.value, frame) for part in keywords if part.arg},
            )
    return UNKNOWN


class _NotReadable(Exception):
    pass


def _known(node: ast.expr, frame: Frame) -> Any:
    value = _read(node, frame)
    if value is UNKNOWN:
        raise _NotReadable
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() > _SMALL:
        raise _NotReadable
    return value


def _mangled(attr: str, frame: Frame) -> str:
    """`self.__x` inside a class is stored as `_Class__x`."""
    if not attr.startswith("__") or attr.endswith("__"):
        return attr
    owner = frame.live.f_code.co_qualname.split(".")
    return f"_{owner[-2].lstrip('_')}{attr}" if len(owner) > 1 else attr


def _attribute(owner: Any, attr: str) -> Any:
    """An attribute, unless reading it would run code of the user's (a property, `__getattr__`)."""
    if isinstance(owner, torch.Tensor) or inspect.ismodule(owner):
        return getattr(owner, attr)
    if isinstance(owner, torch.nn.Module):
        for table in (owner.__dict__, owner._parameters, owner._buffers, owner._modules):
            if attr in table:
                return table[attr]
    found = inspect.getattr_static(owner, attr)
    if isinstance(found, property) or hasattr(type(found), "__set__"):
        return UNKNOWN
    return getattr(owner, attr)


def _item(owner: Any, index: Any) -> Any:
    if isinstance(owner, torch.Tensor | list | tuple | dict | torch.nn.ModuleList | torch.nn.ModuleDict | torch.Size):
        return owner[index]
    if type(owner).__getitem__ is not None and isinstance(owner, dict | list):
        return owner[index]
    return UNKNOWN
