"""A function was called with an argument for which it is not defined.

What: the square root of a negative number, `acos` of 1.0001, a negative number to the power of 0.5 are NaN; torch
raises no error.

Why: a rounding error moved a cosine above 1 or a variance below 0, or a quantity that should be positive is not.

Cure: clamp the argument to the domain of the function, slightly inside its ends if the gradient is infinite there.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from torchmedic.diagnose.cures.numbers import (
    Cure,
    expression,
    fill,
    first_that_passes,
    operand_of,
    with_operand,
    written,
)
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._operands import origin
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish, rows, share
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Captured, Op

Outside = Callable[[torch.Tensor], torch.Tensor]


class Domain(NamedTuple):
    words: str
    outside: Outside
    clamp: str


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x.abs() > 1


def _open_unit(x: torch.Tensor) -> torch.Tensor:
    return x.abs() >= 1


_UNIT = Domain("within [-1, 1]", _unit, "A.clamp(-1 + 1e-6, 1 - 1e-6)")
_OPEN = Domain("between -1 and 1", _open_unit, "A.clamp(-1 + 1e-6, 1 - 1e-6)")
_POSITIVE = Domain("0 or more", lambda x: x < 0, "A.clamp(min=1e-12)")
_DOMAINS = {
    "sqrt": _POSITIVE,
    "rsqrt": _POSITIVE,
    "acos": _UNIT,
    "arccos": _UNIT,
    "asin": _UNIT,
    "arcsin": _UNIT,
    "atanh": _OPEN,
    "arctanh": _OPEN,
    "erfinv": _OPEN,
    "special_erfinv": _OPEN,
    "acosh": Domain("1 or more", lambda x: x < 1, "A.clamp(min=1 + 1e-6)"),
    "logit": Domain("between 0 and 1", lambda x: (x <= 0) | (x >= 1), "A.clamp(1e-6, 1 - 1e-6)"),
    "special_logit": Domain("between 0 and 1", lambda x: (x <= 0) | (x >= 1), "A.clamp(1e-6, 1 - 1e-6)"),
    "special_ndtri": Domain("between 0 and 1", lambda x: (x <= 0) | (x >= 1), "A.clamp(1e-6, 1 - 1e-6)"),
    "lgamma": Domain("no whole number below 1", lambda x: (x <= 0) & (x == x.round()), ""),
    "digamma": Domain("no whole number below 1", lambda x: (x <= 0) & (x == x.round()), ""),
    "polygamma": Domain("no whole number below 1", lambda x: (x <= 0) & (x == x.round()), ""),
    "mvlgamma": Domain("large enough", lambda x: x <= 0, ""),
}


@rule("TM207", "argument-outside-domain")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None or op.derived:
        return None
    domain = _POWER if op.kind in ("pow", "float_power") else _DOMAINS.get(op.kind)
    argument = _argument(op, captured)
    if domain is None or argument is None or not argument.is_floating_point():
        return None
    wrong = _outside_power(argument, captured) if domain is _POWER else domain.outside(argument)
    if wrong is None or not bool(wrong.any()):
        return None
    worst = argument[wrong].flatten()[argument[wrong].abs().argmax()].item()
    shown = _shown(worst, domain)
    draft = begin(
        check,
        evidence,
        "a negative base under a power that is not whole" if domain is _POWER else f"`{op.kind}` outside its domain",
        share(wrong, f"the base of the power, {shown}, is negative", "bases of the power are negative")
        if domain is _POWER
        else share(
            wrong,
            f"the argument of `{op.kind}`, {shown}, is not {domain.words}",
            f"arguments of `{op.kind}` are not {domain.words}",
        ),
        label=f"{op.kind}({shown})" if domain is not _POWER else f"{shown} to a power that is not whole",
        bad=wrong,
        operand=op.inputs[0],
    )
    where = rows(wrong, evidence)

    def why(maker: Op, own_line: bool) -> str:
        return f"{shown} here{', ' + where if where else ''}" if own_line else ""

    draft.at(origin(evidence, op.inputs[0], why))
    draft.because(f"the argument is {described(argument)}")
    if shown != f"{worst:.6g}":
        draft.because("the argument is outside by no more than a rounding error")
    advice = f"clamp the argument to the domain: `{domain.clamp.replace('A', 'x', 1)}`" if domain.clamp else ""
    draft.treat(first_that_passes(evidence, _cures(evidence, op, domain)), otherwise=advice)
    return finish(draft, evidence)


def _shown(worst: float, domain: Domain) -> str:
    """A number with so many digits that the reader sees it outside of the domain: 1.00000012."""
    short = f"{worst:.6g}"
    rounded = torch.tensor(float(short), dtype=torch.float64)
    return short if bool(domain.outside(rounded)) else f"{worst:.9g}"


_POWER = Domain("0 or more", lambda x: x < 0, "A.clamp(min=1e-12)")


def _argument(op: Op, captured: Captured) -> torch.Tensor | None:
    argument = captured.argument(1 if op.kind == "polygamma" else 0)
    return argument if isinstance(argument, torch.Tensor) else None


def _outside_power(base: torch.Tensor, captured: Captured) -> torch.Tensor | None:
    exponent = captured.argument(1)
    if isinstance(exponent, torch.Tensor):
        if not exponent.is_floating_point() or exponent.shape != base.shape:
            whole = bool((exponent == exponent.round()).all())
            return None if whole else base < 0
        return (base < 0) & (exponent != exponent.round())
    return base < 0 if isinstance(exponent, float) and exponent != round(exponent) else None


def _cures(evidence: NumbersEvidence, op: Op, domain: Domain) -> Iterator[Cure]:
    found = expression(evidence)
    if found is None or not domain.clamp:
        return
    node, spot = found
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        argument: ast.expr | None = node.left
    else:
        argument = operand_of(node, op.kind, op.kind.removeprefix("special_"), op.kind.replace("a", "arc", 1))
    if argument is None:
        return
    for clamp in (domain.clamp, domain.clamp.replace("1e-12", "1e-8").replace("1e-6", "1e-4")):
        clamped = fill(clamp, A=argument)
        yield Cure("clamp the argument to the domain", written(with_operand(node, argument, clamped), node), spot)
