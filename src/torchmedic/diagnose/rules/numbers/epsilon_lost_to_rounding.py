"""A small constant that should keep a number away from zero was lost to rounding.

What: 1e-8 is 0 in float16, and 1 - 1e-8 is 1 in float32. A divisor or the argument of a logarithm is then zero in spite
of the constant.

Why: the constant was chosen for a wider dtype than the one that the line uses: under autocast, in a model cast with
`.half()`, or next to 1, where float32 has a resolution of 6e-8.

Cure: use a constant that the dtype can represent (`torch.finfo(x.dtype).eps`), or float32 for that line.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.diagnose.cures.edits import whole
from torchmedic.diagnose.cures.numbers import Cure, first_that_passes
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import begin, finish
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.step.trial import node_at
from torchmedic.replay.trace.microscope import Captured, Op, Value

# Where the operand stands that must not be zero.
_OPERAND = {"div": 1, "reciprocal": 0, "rsqrt": 0, "sqrt": 0, "log": 0, "log2": 0, "log10": 0, "pow": 0, "xlogy": 1}
_KEEPING = frozenset("add sub rsub clamp clamp_min clamp_max maximum minimum".split())
_MAX_DEPTH = 5  # operations behind the bad one
_REPRESENTABLE = {torch.float16: ("1e-4", "1e-3"), torch.bfloat16: ("1e-2",), torch.float32: ("1e-6",)}


class Lost(NamedTuple):
    op: Op
    constant: float
    rounded: float
    dtype: torch.dtype


@rule("TM206", "epsilon-lost-to-rounding")
def check(evidence: NumbersEvidence) -> Draft | None:
    forward = evidence.forward_op
    if forward is None or forward.derived or forward.kind not in _OPERAND:
        return None
    values = evidence.replay_with_values(forward)
    operand = values.argument(_OPERAND[forward.kind]) if values is not None else None
    if values is None or not isinstance(operand, torch.Tensor) or not bool((operand == 0).any()):
        return None
    position = sum(isinstance(part, torch.Tensor) for part in values.args[: _OPERAND[forward.kind]])
    lost = _find(evidence, forward.inputs[position])
    if lost is None:
        return None
    dtype = str(lost.dtype).removeprefix("torch.")
    event = f"a constant that is lost in {dtype}"
    why = (
        f"{lost.constant!r} is {lost.rounded:g} in {dtype}, so it does not keep the operand of `{forward.kind}` from 0"
    )
    label = f"{lost.constant!r} is {lost.rounded:g} in {dtype}"
    draft = begin(check, evidence, event, why, label=label, bad=operand == 0, spot=lost.op.spot or evidence.spot)
    draft.mark(forward.spot, "surfaced", f"`{forward.kind}` of 0")
    draft.treat(first_that_passes(evidence, _cures(lost)))
    if not draft.has_treatment:
        draft.help(
            f"use a constant that {dtype} can hold, such as torch.finfo(torch.{dtype}).eps, or compute in float32"
        )
    return finish(draft, evidence)


def _find(evidence: NumbersEvidence, value: Value) -> Lost | None:
    """Look back from the zero for an operation that was to prevent it."""
    scope = evidence.scope
    assert scope is not None
    pending: list[tuple[Value, int]] = [(value, 0)]
    while pending:
        here, depth = pending.pop(0)
        source = scope.source(here)
        if not isinstance(source, int) or depth > _MAX_DEPTH:
            continue
        op = scope.ops[source]
        values = evidence.replay_with_values(op)
        if values is None or not values.outputs:
            continue
        if op.kind in _KEEPING:
            for constant in _constants(values):
                dtype = values.outputs[0].dtype
                rounded = float(torch.tensor(constant, dtype=torch.float64).to(dtype).item())
                if _is_lost(constant, rounded):
                    return Lost(op, constant, rounded, dtype)
        pending.extend((given, depth + 1) for given in op.inputs)
    return None


def _constants(values: Captured) -> list[float]:
    found = [part for part in (*values.args[1:], *values.kwargs.values()) if isinstance(part, float)]
    first = values.args[0] if values.args else None
    return [*found, *([first] if isinstance(first, float) else [])]


def _is_lost(constant: float, rounded: float) -> bool:
    if constant in (0, rounded) or abs(constant) > 1.01:
        return False
    return rounded == 0 or (rounded in (1.0, -1.0) and abs(abs(constant) - 1) < 1e-2)


def _cures(lost: Lost) -> Iterator[Cure]:
    found = node_at(lost.op.spot) if lost.op.spot is not None else None
    if found is None or lost.op.spot is None:
        return
    node, _ = found
    for text in _REPRESENTABLE.get(lost.dtype, ()):
        for part in _written(node, lost.constant):
            new = text if lost.rounded == 0 else f"1 - {text}" if lost.rounded > 0 else f"-1 + {text}"
            yield Cure("use a constant that the type can hold", new, whole(lost.op.spot, part))
        if isinstance(node, ast.Call) and any(word.arg == "eps" for word in node.keywords):
            changed = copy.deepcopy(node)
            for word in changed.keywords:
                if word.arg == "eps":
                    word.value = ast.Constant(float(text))
            yield Cure("use an eps that the type can hold", ast.unparse(changed), found[1])


def _written(node: ast.expr, constant: float) -> list[ast.expr]:
    """The parts of an expression that are this constant; a plain name beside an operator is taken for it."""
    exact = [part for part in ast.walk(node) if isinstance(part, ast.expr) and _value(part) == constant]
    if exact:
        return exact[:1]
    match node:
        case ast.BinOp(right=ast.Name() | ast.Attribute() as right):
            return [right]
        case ast.Call(args=[*_, ast.Name() | ast.Attribute() as last]):
            return [last]
        case ast.Call(keywords=[ast.keyword(value=ast.Name() | ast.Attribute() as only)]):
            return [only]
    return []


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=float() | int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _value(operand)
            return None if inner is None else -inner
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
            a, b = _value(left), _value(right)
            if a is None or b is None:
                return None
            return a + b if isinstance(operator, ast.Add) else a - b
    return None
