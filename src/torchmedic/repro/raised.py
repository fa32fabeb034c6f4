"""A program for the operation that raised: from the live frames, else from a replay of the step."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.raising_operands import Catcher
from torchmedic.repro.arguments import Inputs, NotRecordable
from torchmedic.repro.functions import function_lines
from torchmedic.repro.program import Program, fragment, made, pattern
from torchmedic.repro.recipe import Line, Raises, Recipe
from torchmedic.source.lookup.failing_call import UNKNOWN, Call
from torchmedic.source.lookup.safe_eval import OPERATORS
from torchmedic.source.segment.cut import CannotCut

_PLAIN_PYTHON = frozenset(
    "KeyError NameError AttributeError ImportError OSError ArithmeticError RecursionError".split()
)
_UNARY = {ast.USub: "neg", ast.Invert: "invert"}
_IN_PLACE = {ast.And: "iand", ast.Or: "ior", ast.BitAnd: "iand", ast.BitOr: "ior", ast.BitXor: "ixor"}


def program(evidence: RaisedEvidence, header: Recipe) -> Program:
    """The failing call of a step that raised. Raises NotRecordable with the reason if there is no such call."""
    reason = _hopeless(evidence)
    if reason:
        raise NotRecordable(reason)
    inside = any(frame.function == "_engine_run_backward" for frame in evidence.frames)
    why = "backward itself failed, not one operation" if inside else "no operation of torch raised it"
    # The user's own call reads best. A layer is the last resort, because its weights would be new.
    for layers in (False, True):
        for call in reversed(evidence.calls):
            try:
                found = _verified(evidence, header, functools.partial(_lines, call, layers))
            except NotRecordable as reason_found:
                why = why if inside or not call.tensors else str(reason_found)
                continue
            if found is not None:
                return found
    found = _replayed(evidence, header) if _may_be_torch(evidence) else None
    if found is None:
        raise NotRecordable(why)
    return found


def _hopeless(evidence: RaisedEvidence) -> str:
    if evidence.from_loader:
        return "a worker of a DataLoader raised it, and its frames are gone"
    if not evidence.kinds.isdisjoint(("OutOfMemoryError", "MemoryError")) or evidence.says("allocate memory"):
        return "running out of memory is not the fault of one operation"
    if "AcceleratorError" in evidence.kinds or evidence.says("CUDA error"):
        return "the device is lost, and with it the values"
    return ""


def _may_be_torch(evidence: RaisedEvidence) -> bool:
    """Whether a replay of the step is worth its time."""
    if not evidence.kinds.isdisjoint(_PLAIN_PYTHON) or not evidence.frames:
        return False
    return not evidence.frames[-1].is_user or any(call.tensors or not call.is_known for call in evidence.calls)


def _verified(evidence: RaisedEvidence, header: Recipe, lines: Callable[[Inputs], list[Line]]) -> Program | None:
    """The program of the given lines, if it raises the same error as the step."""
    inputs = Inputs()
    made_lines = lines(inputs)
    wanted = outcome_of(evidence.error)
    states: list[dict[str, Any]] = [{}]
    for dtype in evidence.incident.process.notes.autocast.values():
        states.append({"autocast": str(dtype).removeprefix("torch.")})
    for state in states:
        found = made(msgspec.structs.replace(header, **state), inputs, made_lines, wanted)
        for variant in found.variants():
            if variant.holds():
                return variant
        raised = found.error() if evidence.is_traced else None
        if raised is not None and type(raised).__name__ in evidence.message:
            # torch.compile wraps the error of fake tensors, which has another text.
            return found.with_recipe(outcome=outcome_of(raised))
    return None


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


def _replayed(evidence: RaisedEvidence, header: Recipe) -> Program | None:
    try:
        step = evidence.failing_step()
    except CannotCut:
        return None
    catcher = Catcher()
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
