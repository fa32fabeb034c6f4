"""Where the operand of a bad operation came from, and why it is 0."""

from __future__ import annotations

from typing import Any

import torch

from torchmedic.diagnose.rules.numbers._wording import PASSING, described, prepared, rows
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Location
from torchmedic.replay.trace.microscope import Leaf, Op, Value
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.origins import attribute_assignments

# Kinds of operations that give 0 for the same reason.
_SPREADS = ("std", "var", "std_mean", "var_mean")
_NORMS = ("linalg_vector_norm", "norm")
_DIFFERENCES = ("sub", "rsub")
_UNDERFLOWING = ("exp", "softmax", "sigmoid")
_CLIPPING = ("relu", "clamp", "clamp_min", "threshold", "hardtanh")
_KEEPING_ZERO = ("pow", "square", "abs", "neg", "sqrt", "mul", "div")  # 0 where what they are given is 0
_AVERAGES = ("amax", "max", "mean")


def origin(evidence: NumbersEvidence, operand: Value, why: Any) -> Location | None:
    """The nearest line before the cause that made an operand.

    Args:
        evidence: With an origin.
        operand: As the origin read it.
        why: Given the operation that made the operand and whether the line is its own; returns the label or "".
    """
    scope, cause = evidence.scope, evidence.spot
    if scope is None or cause is None:
        return None
    first: Op | None = None
    is_side = False  # whether a sum or difference stands in between, which is 0 although its sides are not
    value = operand
    for _ in range(8):
        source = scope.source(value)
        if isinstance(source, Leaf):
            maker = prepared(evidence, operand)
            if maker is not None:
                return maker.location("origin", f"`{maker.name}` gets its values here")
            return _first_values(evidence, source.tensor)
        op = scope.ops[source] if source is not None else None
        if op is None or op.is_backward:
            return None
        if op.inputs and (
            op.kind in PASSING or (op.kind in _KEEPING_ZERO and first is None and _is_zero_too(evidence, op))
        ):
            value = op.inputs[0]
            continue
        first = first or op
        if op.spot is not None and (op.spot.file, op.spot.line) != (cause.file, cause.line):
            label = "" if is_side else why(first, op is first)
            return op.spot.location("origin", label) if label else None
        value = next(iter(op.inputs), value)
        is_side = is_side or (op is not first and op.kind in (*_DIFFERENCES, "add"))
        if not op.inputs:
            return None
    return None


def _is_zero_too(evidence: NumbersEvidence, op: Op) -> bool:
    """Whether what an operation was given is 0 wherever its result is: a square may also have underflowed."""
    captured = evidence.replay_with_values(op)
    if captured is None or not captured.tensors or not captured.outputs:
        return False
    given, made = captured.tensors[0], captured.outputs[0]
    return given.shape == made.shape and bool((made == 0).any()) and not bool(given[made == 0].any())


def _first_values(evidence: NumbersEvidence, parameter: torch.Tensor) -> Location | None:
    """Where a parameter that no update has changed yet gets its values."""
    if evidence.incident.step or not isinstance(parameter, torch.nn.Parameter):
        return None
    for module in evidence.step.runner.modules if evidence.step is not None else ():
        for part in module.modules():
            for name, held in part._parameters.items():
                if held is parameter:
                    made = next(attribute_assignments(type(part), name), None)
                    label = f"`{name}` is {described(parameter.detach())} from here on"
                    return node_location("origin", *made, label) if made is not None else None
    return None


def why_zero(evidence: NumbersEvidence, zeros: torch.Tensor | None) -> Any:
    """Says why an operand is zero, from the operation that made it."""

    def why(op: Op, own_line: bool) -> str:
        text = _zero_because(evidence, op, zeros)
        if not text or (op.kind in _DIFFERENCES and not own_line):
            return ""  # of a difference that stands on the line of the cause, this is one side
        return f"{text}, so this is 0" if own_line else text

    return why


def _zero_because(evidence: NumbersEvidence, op: Op, zeros: torch.Tensor | None) -> str:
    """Why an operation gave 0, by its kind and its values; empty where that is not known."""
    captured = evidence.replay_with_values(op)
    if captured is None or not captured.outputs:
        return ""
    where = rows(zeros, evidence) if zeros is not None else ""
    of, inside = (f" of {where}", f" in {where}") if where else ("", "")
    made = captured.outputs[0]
    if op.kind in (*_DIFFERENCES, *_CLIPPING) and made.numel() > made.shape[:1].numel() and bool(made.any()):
        inside = f" in {int((made == 0).sum())} of {made.numel()} places"  # of a row, some may be other than 0
    operand = captured.tensors[0] if captured.tensors else None
    count = operand.numel() // max(1, captured.outputs[0].numel()) if operand is not None else 0
    if op.kind == "sum":
        return _zero_sum(operand, count, of, inside)
    if op.kind in _SPREADS:
        return f"all {count} values{of} are equal" if count > 1 else ""
    if op.kind in _NORMS:
        return f"all {count} values{of} are 0" if count > 1 else f"the value{of} is 0"
    if op.kind in _DIFFERENCES:
        return f"the two sides are equal{inside}"
    if op.kind in _UNDERFLOWING:
        return f"underflows to 0{inside}"
    if op.kind in _CLIPPING:
        return f"nothing is above 0{inside}"
    if op.kind in _AVERAGES and operand is not None and not bool(operand.any()):
        return f"all values{of} are 0"
    return ""


def _zero_sum(operand: torch.Tensor | None, count: int, of: str, inside: str) -> str:
    if operand is not None and bool(((operand == 0) | (operand == 1)).all()):
        return f"nothing is selected{inside}"
    if operand is not None and bool((operand >= 0).all()):
        return f"all {count} values{of} are 0"
    return f"the values{of} add up to 0"
