"""Intended infinities were combined in an operation whose result is NaN.

What: inf - inf, 0 * inf and inf / inf are NaN. Each operand may be intended, for example as a mask or a bound.

Why: most often a mask was applied by multiplication, `mask * float("-inf")`, which is NaN wherever the mask is 0; or
masked scores are subtracted from each other, added with the opposite sign, or multiplied by zero weights.

Cure: select instead of multiplying (`torch.where`, `masked_fill`), or mask with a large finite number.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.numbers import Cure, fill, first_at_origin, written
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish, not_finite
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Location
from torchmedic.replay.trace.microscope import Captured, Leaf, Op, Spot

_SUMS = frozenset("add sub rsub sum mean cumsum logcumsumexp diff logaddexp addmm baddbmm var std".split())
_PRODUCTS = frozenset("mul mm bmm matmul addcmul dot mv addmv linear prod".split())


@rule("TM210", "infinity-minus-infinity")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None or evidence.birth is None or evidence.birth.kind != "nan":
        return None
    infinite = [tensor for tensor in captured.tensors if tensor.is_floating_point() and bool(tensor.isinf().any())]
    constants = [part for part in captured.args if isinstance(part, float) and math.isinf(part)]
    if not infinite and not constants:
        return None
    bad = not_finite(captured.outputs[0])
    formula = _formula(op, captured, infinite, constants)
    if formula is None:
        return None
    why = f"`{op.kind}` was given infinities that are there on purpose, and {formula} is NaN"
    draft = begin(check, evidence, formula, why, label=f"{formula} is NaN", bad=bad)
    draft.at(_written_at(evidence, op))
    draft.because(*(f"an operand is {described(tensor)}" for tensor in captured.tensors[:3]))
    draft.treat(first_at_origin(evidence, _cures))
    return finish(draft, evidence)


def _formula(op: Op, captured: Captured, infinite: list[torch.Tensor], constants: list[float]) -> str | None:
    if op.kind in _PRODUCTS:
        return "0 * infinity"
    if op.kind in ("div", "true_divide"):
        return "infinity / infinity"
    if op.kind in _SUMS:
        return "infinity - infinity"
    return None


def _written_at(evidence: NumbersEvidence, op: Op) -> Location | None:
    scope = evidence.scope
    for value in op.inputs:
        if scope is None or not math.isinf(scope.magnitude(value)):
            continue
        source = scope.source(value, math.isinf)
        if source is not None and not isinstance(source, Leaf) and scope.ops[source].spot is not None:
            made = scope.ops[source]
            assert made.spot is not None
            return made.spot.location("origin", "the infinity comes from here")
    return None


def _cures(node: ast.expr, spot: Spot) -> Iterator[Cure]:
    match node:
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            mask, constant = (left, right) if _is_infinite(right) else (right, left)
            if _is_infinite(constant):
                chosen = fill("torch.where(M != 0, C, 0.0)", M=mask, C=constant)
                yield Cure("select values instead of multiplying", written(chosen, node), spot)
                yield Cure(
                    "mask with a large negative number",
                    written(fill("M * -1e9", M=mask), node),
                    spot,
                    same_values=False,
                )


def _is_infinite(node: ast.expr) -> bool:
    text = ast.unparse(node).replace('"', "'").replace(" ", "").lower()
    return "inf" in text and len(text) < 24
