"""The operation that raised, as a program: read off the live frames, else caught in a replay of the step."""

from __future__ import annotations

import ast
import contextlib
import functools
import operator
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from torchmedic.replay.bounds import ReplayTooLong
from torchmedic.replay.calls import UNKNOWN, Call
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.reading import OPERATORS
from torchmedic.replay.segment import CannotCut
from torchmedic.replay.step import from_traceback
from torchmedic.repro.arguments import Inputs, NotRecordable
from torchmedic.repro.aten import FRIENDLY
from torchmedic.repro.nonfinite import made
from torchmedic.repro.program import Program, fragment, pattern
from torchmedic.repro.recipe import Line, Raises, Recipe, Ref
from torchmedic.repro.wording import INFIX

_TIME_LIMIT = 30.0
_NAMESPACES = (
    ("torch.", torch),
    ("torch.nn.functional.", torch.nn.functional),
    ("torch.linalg.", torch.linalg),
    ("torch.special.", torch.special),
    ("torch.fft.", torch.fft),
    ("torch.distributions.", torch.distributions),
    ("torch._C._nn.", torch._C._nn),
)
_UNARY = {ast.USub: "neg", ast.Invert: "invert"}
_IN_PLACE = {ast.And: "iand", ast.Or: "ior", ast.BitAnd: "iand", ast.BitOr: "ior", ast.BitXor: "ixor"}


def program(evidence: RaisedEvidence, header: Recipe) -> Program:
    """The failing call of a step that raised.

    Raises:
        NotRecordable: There is none, with the reason.
    """
    reason = _hopeless(evidence)
    if reason:
        raise NotRecordable(reason)
    inside = any(frame.function == "_engine_run_backward" for frame in evidence.frames)
    why = "backward itself failed, not one operation" if inside else "no operation of torch raised it"
    # What the user has written reads best; a layer, whose weights would be new ones, is the last resort.
    for layers in (False, True):
        for call in reversed(evidence.calls):
            try:
                found = _verified(evidence, header, functools.partial(_lines, call, layers))
            except NotRecordable as reason_found:
                why = why if inside or not call.tensors else str(reason_found)
                continue
            if found is not None:
                return found
    found = _replayed(evidence, header)
    if found is None:
        raise NotRecordable(why)
    return found


def _hopeless(evidence: RaisedEvidence) -> str:
    if evidence.from_loader:
        return "a worker of a DataLoader raised it, and its frames are gone"
    if "OutOfMemoryError" in evidence.kinds:
        return "running out of memory is not the fault of one operation"
    if "AcceleratorError" in evidence.kinds or evidence.says("CUDA error"):
        return "the device is lost, and with it the values"
    return ""


def _verified(evidence: RaisedEvidence, header: Recipe, lines: Callable[[Inputs], list[Line]]) -> Program | None:
    """A program of these lines, if it raises what the step raised."""
    inputs = Inputs()
    made_lines = lines(inputs)
    wanted = _wanted(evidence)
    states: list[dict[str, Any]] = [{}]
    for dtype in evidence.incident.agent.notes.autocast.values():
        states.append({"autocast": str(dtype).removeprefix("torch.")})
    for state in states:
        found = made(msgspec.structs.replace(header, **state), inputs, made_lines, wanted)
        for variant in found.variants():
            if variant.holds():
                return variant
        raised = found.error() if evidence.is_traced else None
        if raised is not None and type(raised).__name__ in evidence.message:
            # The tracer of torch.compile wraps what fake tensors raised, which is worded otherwise.
            return found.with_recipe(outcome=outcome_of(raised))
    return None


def _wanted(evidence: RaisedEvidence) -> Raises:
    return outcome_of(evidence.error)


def outcome_of(error: BaseException) -> Raises:
    return Raises(kind=type(error).__name__, fragment=fragment(error), pattern=pattern(error))


def _lines(call: Call, layers: bool, inputs: Inputs) -> list[Line]:
    if not call.is_known:
        raise NotRecordable("the arguments of the failing call could not be read")
    if call.function is None:
        return [_operator_line(call, inputs)]
    positional = [(argument.value, argument.text) for argument in call.arguments if not argument.name]
    keywords = {argument.name: (argument.value, argument.text) for argument in call.arguments if argument.name}
    return function_lines(call.function, positional, keywords, inputs, layers=layers)


def _operator_line(call: Call, inputs: Inputs) -> Line:
    node: Any = call.frame.node
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            name = OPERATORS[type(op)][1].__name__
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            name = OPERATORS[type(op)][1].__name__
        case ast.UnaryOp(op=op) if type(op) in _UNARY:
            name = _UNARY[type(op)]
        case ast.Subscript(ctx=ast.Load()):
            name = "getitem"
        case ast.Subscript(ctx=ast.Store()) if call.whole:
            name = "setitem"
        case None if isinstance(call.frame.statement, ast.AugAssign):
            kind = type(call.frame.statement.op)
            name = _IN_PLACE.get(kind) or "i" + OPERATORS[kind][1].__name__
        case _:
            raise NotRecordable("the failing expression is not a call")
    if not call.tensors:
        raise NotRecordable("no operation of torch raised it")
    args = tuple(inputs.argument(argument.value, argument.text) for argument in call.arguments)
    return Line(target=f"operator.{name}", args=args, result="result")


def function_lines(
    function: Any,
    positional: list[tuple[Any, str]],
    keywords: dict[str, tuple[Any, str]],
    inputs: Inputs,
    *,
    layers: bool = False,
) -> list[Line]:
    """The lines that call a function of torch's.

    Raises:
        NotRecordable: It is not a function of torch's, or an argument is not plain.
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
    """How a script calls a function of torch's."""
    name = str(getattr(function, "__name__", ""))
    if isinstance(function, torch._ops.OpOverload) and function.namespace == "aten":
        return f"torch.ops.{function}"
    if isinstance(function, str) and hasattr(torch.Tensor, function):
        return f"Tensor.{function}"  # a method, as torch.compile notes it
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
    """What the operation of the same name calls its arguments."""
    packet = getattr(torch.ops.aten, str(getattr(function, "__name__", "")), None)
    with contextlib.suppress(Exception):
        schema = getattr(packet, packet.overloads()[0])._schema  # type: ignore[union-attr]
        names = [FRIENDLY.get(argument.name, argument.name) for argument in schema.arguments]
        return [*names, *[""] * count][:count]
    return [""] * count


def _layer_of(function: Any) -> torch.nn.Module | None:
    """The layer of torch's own that is called, by itself or through its `forward`."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if not isinstance(owner, torch.nn.Module) or getattr(torch.nn, type(owner).__name__, None) is not type(owner):
        return None
    return owner if function is owner or getattr(function, "__name__", "") in ("forward", "_call_impl") else None


def _built(layer: torch.nn.Module, inputs: Inputs) -> Line:
    """The constructor of a layer, from what its `repr` says of it. Its weights are new."""
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


class _Catcher(TorchFunctionMode):
    """Holds on to the innermost call of torch's Python API that raises."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self.caught: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self.autocast = ""
        self._deadline = deadline

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if time.monotonic() > self._deadline:
            raise ReplayTooLong
        try:
            return func(*args, **kwargs)
        except Exception:
            self.caught = (func, args, kwargs)
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    self.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            raise


def _replayed(evidence: RaisedEvidence, header: Recipe) -> Program | None:
    try:
        step = from_traceback(evidence.error.__traceback__, evidence.incident.agent)
    except CannotCut:
        return None
    catcher = _Catcher(time.monotonic() + _TIME_LIMIT)
    played = step.runner.play(catcher)
    same = played.error is not None and pattern(played.error) == pattern(evidence.error)
    if not same or catcher.caught is None:
        return None
    function, args, kwargs = catcher.caught
    if any(value is UNKNOWN for value in args):
        return None
    header = msgspec.structs.replace(header, autocast=catcher.autocast)

    def lines(inputs: Inputs) -> list[Line]:
        return function_lines(
            function, [(value, "") for value in args], {key: (value, "") for key, value in kwargs.items()}, inputs
        )

    try:
        return _verified(evidence, header, lines)
    except NotRecordable:
        return None


__all__ = ["function_lines", "outcome_of", "program"]
