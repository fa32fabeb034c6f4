"""The value of an expression in a live frame, if looking cannot change anything.

Names, attributes, items and constants are looked up. Beyond that only what torch itself defines as a function of its
inputs is computed once more: never code of the user's, never anything random, nothing in place, nothing big, and on a
device nothing that would wait for it.
"""

from __future__ import annotations

import ast
import collections
import copy
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from torchmedic.source.live_frames import Frame


class _Unknown:
    def __repr__(self) -> str:
        return "<not known>"


UNKNOWN: Final = _Unknown()

OPERATORS: dict[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
    ast.FloorDiv: ("floor_divide", operator.floordiv),
    ast.Mod: ("remainder", operator.mod),
    ast.Pow: ("pow", operator.pow),
    ast.MatMult: ("matmul", operator.matmul),
    ast.BitAnd: ("bitwise_and", operator.and_),
    ast.BitOr: ("bitwise_or", operator.or_),
    ast.BitXor: ("bitwise_xor", operator.xor),
    ast.Lt: ("lt", operator.lt),
    ast.LtE: ("le", operator.le),
    ast.Gt: ("gt", operator.gt),
    ast.GtE: ("ge", operator.ge),
    ast.Eq: ("eq", operator.eq),
    ast.NotEq: ("ne", operator.ne),
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Invert: operator.invert}
_MAX_ELEMENTS = 4_000_000  # elements of the result of a pure operation that is repeated
_MAX_WEIGHTS = 30_000_000
_RANDOM = frozenset(
    "rand randn randint randperm normal bernoulli multinomial poisson binomial empty empty_like empty_strided "
    "rand_like randn_like randint_like dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d "
    "dropout2d dropout3d rrelu gumbel_softmax fractional_max_pool2d fractional_max_pool3d new_empty "
    "scaled_dot_product_attention".split()
)
# They change an argument, open a file or end the graph, though their names do not say so.
_IMPURE = frozenset(
    "batch_norm instance_norm native_batch_norm embedding embedding_bag from_file backward register_hook retain_grad "
    "requires_grad_ set_ data_ptr storage untyped_storage share_memory_ record_stream".split()
)
# On a device these wait for it.
_WAITING = frozenset(
    "item tolist cpu numpy nonzero masked_select unique unique_consecutive repeat_interleave bincount equal allclose "
    "is_nonzero argwhere to where histc".split()
)
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, slice, type(Ellipsis))
_BUILTINS = (len, int, float, list, tuple, range, abs, min, max, str)
_SCALARS = int | float | bool | complex


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
        case ast.NamedExpr(target=target):
            return frame.lookup(target.id)
        case ast.Attribute(value=owner, attr=attr):
            return _attribute(_known(owner, frame), mangled(attr, frame))
        case ast.Tuple(elts=items) | ast.List(elts=items):
            values = _items(items, frame)
            return tuple(values) if isinstance(node, ast.Tuple) else values
        case ast.Dict(keys=keys, values=items) if None not in keys:
            return dict(zip(_items([key for key in keys if key], frame), _items(items, frame), strict=True))
        case ast.Subscript(value=owner, slice=index):
            return _item(_known(owner, frame), _known(index, frame))
        case ast.Slice(lower=lower, upper=upper, step=step):
            return slice(*(None if part is None else _known(part, frame) for part in (lower, upper, step)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_operand(operand, frame))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)][1](_operand(left, frame), _operand(right, frame))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            return OPERATORS[type(op)][1](_operand(left, frame), _operand(right, frame))
        case ast.Call():
            return _call(node, frame)
    return UNKNOWN


class _NotReadable(Exception):
    pass


def _known(node: ast.expr, frame: Frame) -> Any:
    value = _read(node, frame)
    if value is UNKNOWN:
        raise _NotReadable
    return value


def _operand(node: ast.expr, frame: Frame) -> Any:
    value = _bounded(_known(node, frame))
    if not isinstance(value, torch.Tensor | _SCALARS):
        raise _NotReadable
    return value


def _items(nodes: list[ast.expr], frame: Frame) -> list[Any]:
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, ast.Starred):
            held = _known(node.value, frame)
            if not isinstance(held, list | tuple):
                raise _NotReadable
            values.extend(held)
        else:
            values.append(_known(node, frame))
    return values


def _bounded(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() > _MAX_ELEMENTS:
        raise _NotReadable
    if isinstance(value, list | tuple):
        for item in value[:64]:
            _bounded(item)
    return value


def mangled(attr: str, frame: Frame) -> str:
    """`self.__x` inside a class is stored as `_Class__x`."""
    if not attr.startswith("__") or attr.endswith("__"):
        return attr
    owner = frame.live.f_code.co_qualname.split(".")
    return f"_{owner[-2].lstrip('_')}{attr}" if len(owner) > 1 else attr


def _attribute(owner: Any, attr: str) -> Any:
    """An attribute, unless reading it would run code of the user's (a property, `__getattr__`)."""
    if isinstance(owner, torch.Tensor) or inspect.ismodule(owner):
        return getattr(owner, attr)
    if isinstance(owner, nn.Module):
        for table in (owner.__dict__, owner._parameters, owner._buffers, owner._modules):
            if attr in table:
                return table[attr]
    found = inspect.getattr_static(owner, attr)
    if isinstance(found, property):
        return UNKNOWN
    if hasattr(type(found), "__set__") and not isinstance(found, types.MemberDescriptorType):
        return UNKNOWN
    return getattr(owner, attr)


def _item(owner: Any, index: Any) -> Any:
    if isinstance(owner, collections.UserDict):
        owner = owner.data
    if isinstance(owner, torch.Tensor) and owner.device.type != "cpu":
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts):
            return UNKNOWN
    if isinstance(owner, torch.Tensor | list | tuple | dict | nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return owner[index]
    return UNKNOWN


def _call(node: ast.Call, frame: Frame) -> Any:
    if isinstance(node.func, ast.Attribute) and isinstance(owner := read(node.func.value, frame), torch.Tensor):
        function = getattr(_bounded(owner), node.func.attr)
    else:
        owner, function = None, _known(node.func, frame)
    positional = [_bounded(value) for value in _items(node.args, frame)]
    named = {part.arg: _bounded(_known(part.value, frame)) for part in node.keywords if part.arg}
    if any(part.arg is None for part in node.keywords) or "out" in named or named.get("inplace"):
        return UNKNOWN
    if isinstance(function, nn.Module):
        return forward(function, positional) if not named else UNKNOWN
    given = [owner, *positional, *named.values()]
    if not _is_pure(function, given):
        return UNKNOWN
    return function(*positional, **named)


def _is_pure(function: Any, given: list[Any]) -> bool:
    """Whether this is a function of torch (or a plain builtin) that only computes."""
    name = getattr(function, "__name__", "")
    if any(function is builtin for builtin in _BUILTINS):
        return all(isinstance(value, (*_PLAIN, list, tuple, dict)) for value in given if value is not None)
    if name.endswith("_") or name.startswith("_") or name in _RANDOM or name in _IMPURE:
        return False
    on_device = any(isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta") for value in given)
    if on_device and name in _WAITING:
        return False
    if isinstance(given[0], torch.Tensor):
        return getattr(function, "__self__", None) is given[0] or inspect.ismethod(function)
    native = getattr(torch._C._VariableFunctions, name, None)
    return (
        function is native
        or getattr(function, "__module__", None) in ("torch.nn.functional", "torch.functional", "torch._C._nn")
        or function is getattr(torch._C._nn, name, None)
    )


def forward(module: nn.Module, given: list[Any]) -> Any:
    """What a layer of torch's own returns for these inputs, computed on copies of its buffers and without any hook."""
    if type(module) is nn.Sequential and len(given) == 1:
        value = given[0]
        for child in module:
            value = forward(child, [value])
        return value
    own = type(module).__module__.startswith("torch.nn.modules")
    weights = sum(parameter.numel() for parameter in module.parameters())
    hooked = module._forward_hooks or module._forward_pre_hooks
    renormed = getattr(module, "max_norm", None) is not None  # an embedding that rewrites its weight
    if not own or hooked or renormed or weights > _MAX_WEIGHTS or any(True for _ in module.children()):
        raise _NotReadable
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return given[0]
    twin = copy.copy(module)
    twin._buffers = {name: None if held is None else held.clone() for name, held in module._buffers.items()}
    value = type(module).forward(twin, *(_untouched(item) for item in given))
    return _bounded(value)


def _untouched(value: Any) -> Any:
    """A copy for layers that work in place, such as `ReLU(inplace=True)`."""
    return _bounded(value).clone() if isinstance(value, torch.Tensor) else value
