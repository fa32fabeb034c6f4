"""Calls of torch functions and layers, as lines of a recipe."""

from __future__ import annotations

import ast
import contextlib
import operator
from typing import Any

import torch

from torchmedic.repro.arguments import Inputs, NotRecordable
from torchmedic.repro.aten import FRIENDLY
from torchmedic.repro.recipe import INFIX, Line, Ref

_NAMESPACES = (
    ("torch.", torch),
    ("torch.nn.functional.", torch.nn.functional),
    ("torch.linalg.", torch.linalg),
    ("torch.special.", torch.special),
    ("torch.fft.", torch.fft),
    ("torch.distributions.", torch.distributions),
    ("torch.nn.", torch.nn),
    ("torch._C._nn.", torch._C._nn),
)


def function_lines(
    function: Any,
    positional: list[tuple[Any, str]],
    keywords: dict[str, tuple[Any, str]],
    inputs: Inputs,
    *,
    layers: bool = False,
) -> list[Line]:
    """The lines that call a torch function.

    Raises:
        NotRecordable: It is no torch function, or an argument is not plain.
    """
    layer = _layer_of(function)
    if layer is not None and layers:
        lines, target = [_built(layer, inputs)], "call"
        args: tuple[Any, ...] = (Ref("layer"),)
    else:
        lines, args = [], ()
        target = _spelled(function)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.Tensor) and not (positional and positional[0][0] is owner):
            args = (inputs.argument(owner),)
    texts = _argument_names(function, len(positional))
    args += tuple(inputs.argument(value, text or name) for (value, text), name in zip(positional, texts, strict=True))
    named = {key: inputs.argument(value, text or key) for key, (value, text) in keywords.items()}
    return [*lines, Line(target=target, args=args, kwargs=named, result="result")]


def _spelled(function: Any) -> str:
    """The name of a torch function in a script."""
    name = str(getattr(function, "__name__", ""))
    if isinstance(function, torch._ops.OpOverload) and function.namespace == "aten":
        return f"torch.ops.{function}"
    if isinstance(function, str) and hasattr(torch.Tensor, function):
        return f"Tensor.{function}"  # a method, as torch.compile records it
    if name in INFIX and getattr(operator, name) is function:
        return f"operator.{name}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.Tensor) or getattr(torch.Tensor, name, None) is function:
        special = name.strip("_")
        if name.startswith("__") and (special in INFIX or special in ("getitem", "setitem", "neg", "invert")):
            return f"operator.{special}"
        if name.startswith("__"):
            raise NotRecordable(f"`{name}` has no name in a script")
        return f"Tensor.{name}"
    for prefix, namespace in _NAMESPACES:
        short = name.removeprefix(prefix.split(".")[-2] + "_")  # torch.linalg.inv calls itself linalg_inv
        if name and getattr(namespace, short, None) is function:
            return prefix + short
    raise NotRecordable("the failing call is not one of torch's own")


def _argument_names(function: Any, count: int) -> list[str]:
    """The argument names of the aten operation with the same name."""
    packet = getattr(torch.ops.aten, str(getattr(function, "__name__", "")), None)
    with contextlib.suppress(Exception):
        schema = getattr(packet, packet.overloads()[0])._schema  # type: ignore[union-attr]
        names = [FRIENDLY.get(argument.name, argument.name) for argument in schema.arguments]
        return [*names, *[""] * count][:count]
    return [""] * count


def _layer_of(function: Any) -> torch.nn.Module | None:
    """The torch.nn layer that is called, directly or through its `forward`."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if not isinstance(owner, torch.nn.Module) or getattr(torch.nn, type(owner).__name__, None) is not type(owner):
        return None
    return owner if function is owner or getattr(function, "__name__", "") in ("forward", "_call_impl") else None


def _built(layer: torch.nn.Module, inputs: Inputs) -> Line:
    """The constructor call of a layer, from its `repr`. Its weights are new."""
    try:
        node = ast.parse(repr(layer), mode="eval").body
        assert isinstance(node, ast.Call)
        args = tuple(inputs.argument(ast.literal_eval(part)) for part in node.args)
        named = {part.arg: inputs.argument(ast.literal_eval(part.value)) for part in node.keywords if part.arg}
        dtype = next((weight.dtype for weight in layer.parameters()), torch.float32)
        if dtype is not torch.float32:
            named["dtype"] = inputs.argument(dtype)
    except (SyntaxError, AssertionError, ValueError):
        raise NotRecordable(f"a `{type(layer).__name__}` cannot be built again from what it says of itself") from None
    return Line(target=f"torch.nn.{type(layer).__name__}", args=args, kwargs=named, result="layer")
