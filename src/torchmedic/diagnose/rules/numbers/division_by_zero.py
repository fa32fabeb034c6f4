"""A division by zero made the loss or a gradient infinite or NaN.

What: torch divides by zero without an error: x / 0 is infinite, 0 / 0 is NaN, and both make every value that is
computed from them infinite or NaN.

Why: a norm, a standard deviation, a sum of a mask or a count can be exactly zero for some rows of some batch. The
square of a very small divisor can also be zero, and the gradient divides by that square.

Cure: keep the divisor away from zero (add a small constant, or clamp it), or leave such rows out.
"""

from __future__ import annotations

from typing import Any

import torch

from torchmedic.diagnose.cures.numbers import divisor_cures, first_that_passes
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._operands import origin, why_zero
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish, not_finite, rows, share
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Captured, Op

# The position of the divisor among the arguments.
_DIVISOR = {
    "div": 1,
    "true_divide": 1,
    "divide": 1,
    "floor_divide": 1,
    "remainder": 1,
    "fmod": 1,
    "addcdiv": 2,
    "reciprocal": 0,
    "rsqrt": 0,
    "pow": 0,
    "float_power": 0,
}


@rule("TM201", "division-by-zero")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None:
        return None
    if op.derived:
        return _in_backward(evidence, op, captured)
    divisor = divisor_of(op, captured)
    if divisor is None:
        return None
    zeros = divisor == 0 if isinstance(divisor, torch.Tensor) else torch.tensor(divisor == 0)
    if not bool(zeros.any()):
        return None
    bad = not_finite(captured.outputs[0])
    event = f"division by zero in the {'backward' if op.is_backward else 'forward'} pass"
    why = share(zeros, "the divisor is exactly 0", "divisors are exactly 0")
    label = _formula(op, captured, zeros)
    draft = begin(check, evidence, event, why, label=label, bad=bad)
    position = _DIVISOR[op.kind]
    if isinstance(captured.argument(position), torch.Tensor):
        value = op.inputs[sum(isinstance(part, torch.Tensor) for part in captured.args[:position])]
        draft.at(origin(evidence, value, why_zero(evidence, zeros)))
        where = rows(zeros, evidence)
        draft.because(f"the divisor is {described(divisor)}" + (f"; it is 0 in {where}" if where else ""))
    draft.treat(first_that_passes(evidence, divisor_cures(evidence)))
    return finish(draft, evidence)


def divisor_of(op: Op, captured: Captured) -> Any:
    """What an operation divides by; None where it does not divide."""
    position = _DIVISOR.get(op.kind)
    if position is None:
        return None
    if op.kind in ("pow", "float_power"):
        exponent = captured.argument(1)
        negative = bool((exponent < 0).any()) if isinstance(exponent, torch.Tensor) else exponent < 0
        return captured.argument(0) if negative else None
    return captured.argument(position)


def _formula(op: Op, captured: Captured, zeros: torch.Tensor) -> str:
    if op.kind == "reciprocal":
        return "1 / 0"
    if op.kind == "rsqrt":
        return "1 / sqrt(0)"
    if op.kind in ("pow", "float_power"):
        return "0 to a negative power"
    above = captured.argument(_DIVISOR[op.kind] - 1)
    if not isinstance(above, torch.Tensor):
        return "0 / 0" if above == 0 else "a division by 0"
    hit = torch.broadcast_to(zeros, torch.broadcast_shapes(zeros.shape, above.shape))
    nothing = torch.broadcast_to(above == 0, hit.shape)[hit]
    return "0 / 0" if bool(nothing.all()) else "x / 0"


def _in_backward(evidence: NumbersEvidence, op: Op, captured: Captured) -> Draft | None:
    """The gradient of a division divides by the divisor once more."""
    forward = evidence.forward_op
    if forward is None or forward is op or forward.kind not in ("div", "true_divide", "divide", "reciprocal", "rsqrt"):
        return None
    values = evidence.replay_with_values(forward)
    divisor = divisor_of(forward, values) if values is not None else None
    if values is None or not isinstance(divisor, torch.Tensor) or not divisor.is_floating_point():
        return None
    # The forward value was finite: the divisor is not 0, but so small that dividing by it again overflows.
    smallest = divisor.abs().min().item()
    if smallest == 0 or smallest > 1e-3:
        return None
    tiny = divisor.abs() == smallest
    why = f"the divisor goes down to {smallest:.3g}; the result is finite, but its gradient divides by it again"
    label = f"divides by {smallest:.3g}, and twice in the backward pass"
    draft = begin(check, evidence, "division by almost zero", why, label=label, bad=tiny)
    draft.because(f"the divisor is {described(divisor)}")
    draft.treat(first_that_passes(evidence, divisor_cures(evidence)))
    return finish(draft, evidence)
