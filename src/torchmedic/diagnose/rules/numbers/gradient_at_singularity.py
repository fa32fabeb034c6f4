"""A function with a finite value has an infinite gradient at the point where it was evaluated.

What: the slope of the square root at 0 is infinite, and so is the slope of `acos` at 1 or of x ** 0.5 at 0. The forward
pass and the loss are finite, and the first backward pass fills the weights with infinities or NaN.

Why: a distance of a point to itself, a norm or variance that is exactly 0, a padded entry, a cosine that is exactly 1.

Cure: move the argument slightly away from that point (add a small constant, clamp), or leave such entries out before
the function, not after it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

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
from torchmedic.diagnose.rules.numbers._operands import origin, why_zero
from torchmedic.diagnose.rules.numbers._slopes import singular
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish, rows, share
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Op

_AWAY = {
    "sqrt": ("A + 1e-12", "A + 1e-8", "A.clamp(min=1e-8)"),
    "pow": ("A + 1e-8", "A.clamp(min=1e-8)"),
    "float_power": ("A + 1e-8", "A.clamp(min=1e-8)"),
    "acos": ("A.clamp(-1 + 1e-6, 1 - 1e-6)",),
    "asin": ("A.clamp(-1 + 1e-6, 1 - 1e-6)",),
    "atanh": ("A.clamp(-1 + 1e-6, 1 - 1e-6)",),
    "acosh": ("A.clamp(min=1 + 1e-6)",),
    "rsqrt": ("A + 1e-8",),
    "hypot": ("A + 1e-8",),
    "log": ("A + 1e-8",),
}
_DECOMPOSITIONS = frozenset("linalg_eigh linalg_eig linalg_svd linalg_qr linalg_lu linalg_cholesky_ex".split())


@rule("TM203", "gradient-at-singularity")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, forward = evidence.op, evidence.forward_op
    if op is None or forward is None or not op.derived or forward.derived:
        return None
    values = evidence.replay_with_values(forward)
    if values is None or not values.tensors:
        return None
    if forward.kind in _DECOMPOSITIONS:
        return _of_decomposition(evidence, forward)
    points = singular(values)
    if points is None:
        return None
    position, wrong = points
    argument = values.tensors[position]
    worst = argument[wrong].flatten()[0].item() if wrong.shape == argument.shape else None
    at = f" at {worst:.4g}" if worst is not None else ""
    event = f"the gradient of `{forward.kind}`{at}"
    why = f"`{forward.kind}` is finite here, but its slope is not: " + share(
        wrong, "the argument is on a singular point", "arguments are on a singular point"
    )
    label = f"the slope of {forward.kind}{at} is infinite"
    draft = begin(check, evidence, event, why, label=label, bad=wrong)
    if worst == 0:
        draft.at(origin(evidence, forward.inputs[position], why_zero(evidence, wrong)))
    where = rows(wrong, evidence)
    draft.because(f"the argument is {described(argument)}" + (f"; {where}" if where else ""))
    draft.because(f"the forward result is finite; `{op.node}` made the first value that is not")
    advice = f"keep the argument of `{forward.kind}` away from {worst:.4g}" if worst is not None else ""
    draft.treat(first_that_passes(evidence, _cures(evidence, forward)), otherwise=advice)
    return finish(draft, evidence)


def _cures(evidence: NumbersEvidence, forward: Op) -> Iterator[Cure]:
    found = expression(evidence)
    ways = _AWAY.get(forward.kind)
    if found is None or ways is None:
        return
    node, spot = found
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        argument: ast.expr | None = node.left
    else:
        argument = operand_of(node, forward.kind, forward.kind.replace("a", "arc", 1))
    if argument is None:
        return
    for way in ways:
        title = "keep the argument away from the singular point" if "clamp" in way else "add a small constant"
        text = written(with_operand(node, argument, fill(way, A=argument)), node)
        # Near 1 a small change of the argument is a larger one of the angle.
        yield Cure(title, text, spot, same_values=forward.kind != "acos")


def _of_decomposition(evidence: NumbersEvidence, forward: Op) -> Draft | None:
    """The gradient of eigenvectors divides by the differences of eigenvalues."""
    values = evidence.replay_with_values(forward)
    spectra = [tensor for tensor in values.outputs if tensor.dim() and tensor.is_floating_point()] if values else []
    lines = [tensor for tensor in spectra if values is not None and tensor.dim() == values.tensors[0].dim() - 1]
    if values is None or not lines:
        return None
    gaps = torch.diff(lines[0].sort(-1).values, dim=-1).abs()
    if gaps.numel() == 0:
        return None
    closest = gaps.min().item()
    what = "singular values" if "svd" in forward.kind else "eigenvalues"
    event = f"the gradient of `{forward.kind}` at repeated {what}"
    why = f"two {what} differ by {closest:.3g}, and the gradient divides by their difference"
    label = f"two {what} are {'equal' if closest == 0 else 'nearly equal'}"
    draft = begin(check, evidence, event, why, label=label)
    draft.because(f"the {what} are {described(lines[0])}")
    draft.help(f"use a loss that depends on the {what} only, or add a little noise to the matrix")
    return finish(draft, evidence)
