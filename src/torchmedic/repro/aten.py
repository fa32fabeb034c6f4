"""Readable spellings of an aten operation, as a person would write the call.

The first spelling with the same result is used; the last one is always the operation itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_F = "torch.nn.functional."
_NAMESPACES = {"special_": "torch.special.", "linalg_": "torch.linalg.", "fft_": "torch.fft."}
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
FRIENDLY = {"self": "x", "other": "y", "input": "x", "mat1": "a", "mat2": "b", "tensors": "x"}


class Spelling(NamedTuple):
    """A call that may be equal to the operation. `first`: its result is the first of the operation's results."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: bool = False


def spellings(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Spelling]:
    """Readable calls for an operation, best first."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if not schema.name.startswith("aten::"):
        return
    translate = _TRANSLATED.get(name)
    if translate is not None:
        found = translate(*_complete(func, args, kwargs))
        if found is not None:
            yield found
    short, named = _without_defaults(func, args, kwargs)
    if isinstance(reduction := named.get("reduction"), int):
        named = {**named, "reduction": _REDUCTIONS.get(reduction, reduction)}
    for prefix, namespace in _NAMESPACES.items():
        if name.startswith(prefix):
            yield Spelling(namespace + name.removeprefix(prefix), short, named)
    if name.endswith("_") and not name.startswith("_"):
        yield Spelling(f"Tensor.{name}", short, named)
        return
    if not name.startswith("_"):
        for namespace, owner in (("torch.", torch._C._VariableFunctions), (_F, torch.nn.functional)):
            if hasattr(owner, name):
                yield Spelling(namespace + name, short, named)
        if hasattr(torch.Tensor, name):
            yield Spelling(f"Tensor.{name}", short, named)
    yield Spelling(f"torch.ops.aten.{name}.{schema.overload_name or 'default'}", *_without_defaults(func, args, kwargs))


def hints(func: Any, args: tuple[Any, ...]) -> list[str]:
    """Names for the positional arguments, from the schema."""
    names = [argument.name for argument in func._schema.arguments[: len(args)]]
    return [FRIENDLY.get(name, name) for name in names]


def _complete(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in."""
    values = list(args)
    for argument in func._schema.arguments[len(args) :]:
        values.append(kwargs.get(argument.name, argument.default_value))
    return values


def _without_defaults(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments = func._schema.arguments
    short = list(args)
    while short and _is_default(arguments[len(short) - 1], short[-1]):
        short.pop()
    defaults = {argument.name: argument for argument in arguments}
    # Trailing arguments with a default are clearer by name.
    named: dict[str, Any] = {}
    while short and not _is_tensor(short[-1]) and arguments[len(short) - 1].has_default_value():
        value = short.pop()
        argument = arguments[len(short)]
        if not _is_default(argument, value):
            named[argument.name] = value
    named |= {
        key: value for key, value in kwargs.items() if key not in defaults or not _is_default(defaults[key], value)
    }
    return tuple(short), named


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value() or _is_tensor(value):
        return False
    default = argument.default_value
    return type(default) is type(value) and bool(default == value)


def _is_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _softmax(target: str, x: Any, dim: int, to_float: bool) -> Spelling:
    return Spelling(target, (x,), {"dim": dim, **({"dtype": torch.float32} if to_float else {})})


def _norm(target: str, args: tuple[Any, ...], weight: Any, bias: Any, eps: float, **named: Any) -> Spelling:
    given = _given(weight=weight, bias=bias, eps=None if eps == 1e-5 else eps)
    return Spelling(_F + target, args, {**given, **named}, True)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *rest: Any
) -> Spelling:
    named = {"training": True} if training else {}
    return _norm("batch_norm", (x, mean, var), weight, bias, eps, **named)


def _nll_loss(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Spelling:
    named = _given(weight=weight, ignore_index=None if ignore_index == -100 else ignore_index)
    if reduction != 1:
        named["reduction"] = _REDUCTIONS.get(reduction, "mean")
    return Spelling(_F + "nll_loss", (x, target), named, True)


def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, out: Any, groups: int
) -> Spelling | None:
    if transposed or x.dim() != weight.dim():
        return None
    ones = [1] * len(stride)
    named = _given(
        bias=bias,
        stride=None if list(stride) == ones else list(stride),
        padding=None if not any(padding) else list(padding),
        dilation=None if list(dilation) == ones else list(dilation),
        groups=None if groups == 1 else groups,
    )
    return Spelling(f"{_F}conv{len(stride)}d", (x, weight), named)


def _to(x: Any, dtype: Any = None, *rest: Any) -> Spelling | None:
    return Spelling("Tensor.to", (x, dtype), {}) if dtype is not None else None


def _embedding(weight: Any, indices: Any, padding_idx: int = -1, *rest: Any) -> Spelling:
    return Spelling(_F + "embedding", (indices, weight), {})


def _attention(query: Any, key: Any, value: Any, dropout: Any, causal: Any, mask: Any = None, scale: Any = None) -> Any:
    named = _given(attn_mask=mask, is_causal=True if causal is True else None, scale=scale)
    return Spelling(_F + "scaled_dot_product_attention", (query, key, value), named, True)


def _given(**named: Any) -> dict[str, Any]:
    return {key: value for key, value in named.items() if value is not None}


_TRANSLATED: dict[str, Callable[..., Spelling | None]] = {
    "_softmax": functools.partial(_softmax, "torch.softmax"),
    "_safe_softmax": lambda x, dim, dtype=None: Spelling("torch.softmax", (x,), {"dim": dim}),
    "_log_softmax": functools.partial(_softmax, "torch.log_softmax"),
    "native_layer_norm": lambda x, shape, weight, bias, eps: _norm("layer_norm", (x, list(shape)), weight, bias, eps),
    "native_group_norm": lambda x, weight, bias, n, c, hw, groups, eps: _norm(
        "group_norm", (x, groups), weight, bias, eps
    ),
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_batch_norm_with_update": lambda x, w, b, mean, var, momentum, eps: _batch_norm(
        x, w, b, mean, var, True, momentum, eps
    ),
    "cudnn_batch_norm": _batch_norm,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "convolution": _convolution,
    "_to_copy": _to,
    "embedding": _embedding,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_linalg_svd": lambda x, full, *rest: Spelling("torch.linalg.svd", (x,), {} if full else {"full_matrices": False}),
    "_linalg_eigh": lambda x, *rest: Spelling("torch.linalg.eigh", (x,), {}),
    "t": lambda x: Spelling("Tensor.t", (x,), {}),
}
