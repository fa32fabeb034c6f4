"""An average was computed over an empty set of elements.

What: the mean of an empty tensor is 0 / 0, which is NaN. The same holds for every loss that averages: over an empty
selection, or with all labels equal to `ignore_index`.

Why: no element of this batch passed the filter, every label is padding, or all class weights that apply are zero.

Cure: skip such a batch or term, or divide by `max(count, 1)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.numbers import Cure, expression, fill, first_at_origin, operand_of, written
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import begin, finish, origin
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Captured, Op, Spot

_NLL = frozenset("nll_loss_forward nll_loss2d_forward nll_loss_nd".split())


@rule("TM211", "mean-of-nothing")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None or op.derived:
        return None
    if op.kind in _NLL:
        return _ignored(evidence, captured)
    empty = [number for number, tensor in enumerate(captured.tensors) if tensor.numel() == 0]
    if not empty:
        return _nanmean(evidence, op, captured)
    operand = captured.tensors[empty[0]]
    draft = begin(
        check,
        evidence,
        f"`{op.kind}` of nothing",
        f"`{op.kind}` was given a tensor of shape {list(operand.shape)}, which has no elements",
        label=f"the {op.kind} of no elements is NaN",
    )

    def why(maker: Op, own_line: bool) -> str:
        return "nothing is selected here" if maker.kind in _SELECTING else f"empty here: {list(operand.shape)}"

    draft.at(origin(evidence, op.inputs[empty[0]], why))
    draft.treat(first_at_origin(evidence, _cures))
    return finish(draft, evidence)


_SELECTING = frozenset("index masked_select index_select gather nonzero slice".split())


def _ignored(evidence: NumbersEvidence, captured: Captured) -> Draft | None:
    scores, labels = captured.argument(0), captured.argument(1)
    weight, ignored = captured.argument(2), captured.argument(4)
    if not isinstance(labels, torch.Tensor):
        return None
    if labels.numel() == 0:
        why, label = "the loss was given no labels at all", "the mean over no labels is NaN"
    elif bool((labels == ignored).all()):
        why = f"all {labels.numel()} labels are {ignored}, which is `ignore_index`: nothing is left to average over"
        label = f"all {labels.numel()} labels are ignored"
    elif isinstance(weight, torch.Tensor) and not bool(weight[labels[labels != ignored]].any()):
        why, label = "the class weights of all labels in this batch are 0", "all labels have weight 0"
    else:
        return None
    draft = begin(check, evidence, "a loss averaged over nothing", why, label=label)
    draft.because(f"the scores are {list(scores.shape)}, the labels {list(labels.shape)}")
    draft.treat(first_at_origin(evidence, _label_cures, int(ignored)))
    return finish(draft, evidence)


def _nanmean(evidence: NumbersEvidence, op: Op, captured: Captured) -> Draft | None:
    found = expression(evidence)
    if op.kind != "div" or found is None or operand_of(found[0], "nanmean") is None:
        return None
    event = "`nanmean` of nothing but NaN"
    why = "every value that `nanmean` averages over is NaN, so nothing is left"
    label = "the mean of no elements is NaN"
    draft = begin(check, evidence, event, why, label=label)
    return finish(draft, evidence)


def _cures(node: ast.expr, spot: Spot) -> Iterator[Cure]:
    operand = operand_of(node, "mean")
    if operand is not None and isinstance(node, ast.Call) and len(node.args) <= 1 and not node.keywords:
        text = written(fill("A.sum() / max(A.numel(), 1)", A=operand), node)
        yield Cure("divide by at least one", text, spot)
    if isinstance(node, ast.Call) and node.args:
        first = node.args[0]
        text = written(fill("E if A.numel() else A.sum()", E=node, A=first), node)
        yield Cure("leave the term out when there is nothing to average", text, spot)


def _label_cures(node: ast.expr, spot: Spot, ignored: int) -> Iterator[Cure]:
    if not isinstance(node, ast.Call):
        return
    arguments = [*node.args, *(word.value for word in node.keywords if word.arg in ("input", "target"))]
    if len(arguments) < 2:
        return
    text = written(fill(f"E if (Y != {ignored}).any() else X.sum() * 0", E=node, X=arguments[0], Y=arguments[1]), node)
    yield Cure("leave the term out when no label counts", text, spot)
