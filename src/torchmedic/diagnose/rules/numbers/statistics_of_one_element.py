"""A standard deviation or variance was computed over too few values.

What: torch divides by the number of values minus one by default, so the standard deviation of a single value is 0 / 0,
which is NaN.

Why: the last batch of an epoch has a single item, a group or a sequence has length one, or the wrong dimension is
reduced.

Cure: pass `unbiased=False` (or `correction=0`), drop incomplete batches (`drop_last=True`), or treat single values
separately.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.numbers import Cure, expression, first_at_origin, operand_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._expressions import enclosing
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish, not_finite
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Captured, Op, Spot

_STATISTICS = ("std", "var", "std_mean", "var_mean")
_NORMALISATIONS = frozenset("native_layer_norm native_group_norm native_batch_norm batch_norm_impl_index".split())
_NORMALISATIONS |= frozenset("native_batch_norm_legit cudnn_batch_norm fused_rms_norm rms_norm".split())


@rule("TM209", "statistics-of-one-element")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None or op.derived:
        return None
    if op.kind == "div":
        return _covariance(evidence)
    if op.kind in _NORMALISATIONS:
        return _of_constant(evidence, op, captured)
    operand = captured.argument(0)
    if op.kind not in _STATISTICS or not isinstance(operand, torch.Tensor) or not captured.outputs[0].numel():
        return None
    count = operand.numel() // captured.outputs[0].numel()
    correction = captured.argument(2, "correction", 1)
    correction = 1 if correction is None else float(correction)
    if count > correction:
        return None
    dim = captured.argument(1, "dim")
    along = f" along dimension {', '.join(map(str, dim))}" if dim else ""
    return _diagnosis(evidence, op.kind, count, f"{list(operand.shape)}{along}")


def _of_constant(evidence: NumbersEvidence, op: Op, captured: Captured) -> Draft | None:
    """A normalisation divides by a standard deviation; of equal values that is 0, and `eps` is there for that."""
    operand = captured.argument(0)
    eps = [part for part in (*captured.args, *captured.kwargs.values()) if isinstance(part, float)]
    if not isinstance(operand, torch.Tensor) or not eps or eps[-1] > 1e-20:
        return None
    bad = not_finite(captured.outputs[0])
    name = op.kind.removeprefix("native_").removesuffix("_legit")
    event = f"`{name}` of values that are all equal"
    why = f"the standard deviation of equal values is 0, and eps is {eps[-1]:g}, so `{name}` divides by 0"
    label = f"{name} of equal values, with eps={eps[-1]:g}"
    draft = begin(check, evidence, event, why, label=label, bad=bad)
    draft.because(f"the input is {described(operand)}")
    draft.help("build the layer with an eps above zero, such as 1e-5")
    return finish(draft, evidence)


def _covariance(evidence: NumbersEvidence) -> Draft | None:
    """`torch.cov` and `torch.corrcoef` divide by the number of observations minus one."""
    found = expression(evidence)
    operand = operand_of(found[0], "cov", "corrcoef") if found is not None else None
    captured = evidence.replay_with_values(evidence.op)
    if operand is None or captured is None or not isinstance(captured.argument(1), torch.Tensor | float | int):
        return None
    divisor = captured.argument(1)
    if not bool(torch.as_tensor(divisor == 0).all()):
        return None
    return _diagnosis(evidence, "cov", 1, "one observation")


def _diagnosis(evidence: NumbersEvidence, kind: str, count: int, what: str) -> Draft:
    values = "one value" if count == 1 else f"{count} values"
    why = f"`{kind}` divides by the number of values minus one, which is {count - 1} here"
    draft = begin(check, evidence, f"`{kind}` of {values}", why, label=f"{kind} of {values}")
    draft.because(f"`{kind}` was taken of {what}")
    sizes = {tensor.shape[0] for tensor in evidence.agent.batches.tensors() if tensor.dim()}
    if sizes == {1}:
        draft.because("the batch holds a single item")
        draft.help("drop the incomplete last batch: DataLoader(..., drop_last=True)")
    draft.treat(first_at_origin(evidence, _cures))
    return finish(draft, evidence)


def _cures(node: ast.expr, spot: Spot) -> Iterator[Cure]:
    if not isinstance(node, ast.Call) or operand_of(node, *_STATISTICS) is None:
        return
    plain = copy.deepcopy(node)
    plain.keywords = [word for word in plain.keywords if word.arg not in ("unbiased", "correction")]
    plain.args = [part for part in plain.args if not (isinstance(part, ast.Constant) and isinstance(part.value, bool))]
    plain.keywords.append(ast.keyword("unbiased", ast.Constant(False)))
    text = ast.unparse(plain)
    yield Cure("do not correct for the sample size", text, spot, same_values=False)
    divided = any(isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div) for outer, _ in enclosing(node, spot))
    title = "do not correct for the sample size" + (", and keep the divisor away from zero" if divided else "")
    yield Cure(title, f"({text} + 1e-6)", spot, same_values=False)
