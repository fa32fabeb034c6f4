"""A division by zero made the loss or a gradient infinite or NaN.

What: torch divides by zero without an error: x / 0 is infinite, 0 / 0 is NaN, and either one spoils everything that is
computed from it.

Why: a norm, a standard deviation, a sum of a mask or a count can be exactly zero for some rows of some batch.

Cure: keep the divisor away from zero (add a small constant, or clamp it), or leave such rows out.
"""

from __future__ import annotations

import ast

import torch

from torchmedic.diagnose.numbers import draft_at_birth, rows
from torchmedic.diagnose.rule import Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.numbers import NumbersEvidence
from torchmedic.replay.trial import expression_at

CODE, NAME = "TM201", "division-by-zero"

_DIVISIONS = frozenset("div div_ true_divide true_divide_ reciprocal reciprocal_ rsqrt rsqrt_".split())


def check(evidence: NumbersEvidence) -> Diagnosis | None:
    op, captured = evidence.op, evidence.captured
    if op is None or captured is None or op.is_backward or op.name.split(".")[0] not in _DIVISIONS:
        return None
    divisor = captured.args[0] if op.name.startswith(("reciprocal", "rsqrt")) else captured.args[1]
    zeros = (divisor == 0).sum().item() if isinstance(divisor, torch.Tensor) else int(divisor == 0)
    count = divisor.numel() if isinstance(divisor, torch.Tensor) else 1
    if not zeros:
        return None
    share = "the divisor is exactly 0" if zeros == count else f"{zeros} of {count} divisors are exactly 0"
    draft = draft_at_birth(evidence, CODE, NAME, "division by zero in the forward pass", share)
    if isinstance(divisor, torch.Tensor) and zeros < count:
        draft.because(rows(divisor == 0, evidence))
    expression = expression_at(evidence.spot) if evidence.spot is not None else None
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div):
        left, right = ast.unparse(expression.left), ast.unparse(expression.right)
        draft.treat(
            evidence.trial("add a small constant to the divisor", f"{left} / ({right} + 1e-6)")
            or evidence.trial("keep the divisor away from zero", f"{left} / ({right}).clamp(min=1e-6)")
        )
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


RULE = Rule(CODE, NAME, check)
