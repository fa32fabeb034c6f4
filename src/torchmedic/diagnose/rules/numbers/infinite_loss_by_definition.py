"""The loss is infinite by its definition for this input.

What: some losses are infinite by definition for some inputs: CTC when the target is longer than the input, cross
entropy when the class of the label is masked out, a divergence from a distribution that is zero there.

Why: the batch contains such an item, or a mask covers a class that is also a label.

Cure: leave such items out (`zero_infinity=True` for CTC), or do not mask classes that are labels.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Iterator

import torch
from torch import nn

from torchmedic.diagnose.cures.numbers import Cure, first_at_origin, operand_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import begin, finish, not_finite
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Treatment
from torchmedic.replay.step.trial import describe, passes
from torchmedic.replay.trace.bad_value_origins import is_deliberate
from torchmedic.replay.trace.microscope import Captured, Op, Spot

_CTC = frozenset("ctc_loss cudnn_ctc_loss".split())


@rule("TM212", "infinite-loss-by-definition")
def check(evidence: NumbersEvidence) -> Draft | None:
    birth, op = evidence.birth, evidence.op
    if birth is None:
        return None
    if op is not None and op.kind in _CTC and not op.derived:
        captured = evidence.replay_with_values(evidence.op)
        return _of_ctc(evidence, captured) if captured is not None else None
    if birth.kind == "inf" and birth.spoiled is None and is_deliberate(birth):
        return _of_mask(evidence)
    return None


def _of_ctc(evidence: NumbersEvidence, captured: Captured) -> Draft | None:
    losses = captured.outputs[0]
    inputs, targets = captured.argument(2), captured.argument(3)
    bad = not_finite(losses)
    if bad is None or not bool(bad.any()):
        return None
    facts = []
    for row in bad.nonzero().flatten().tolist()[:3]:
        length, wanted = _length(inputs, row), _length(targets, row)
        if length is not None and wanted is not None:
            repeats = _repeats(captured, row)
            need = wanted + repeats
            detail = f"{wanted} labels" + (f" with {repeats} repeated, so {need} steps are needed" if repeats else "")
            facts.append(f"row {row}: {detail}, {length} steps of input")
    event = "a CTC target that does not fit into its input"
    why = (
        f"{int(bad.sum().item())} of {losses.numel()} targets need more steps than the input has, "
        "so their probability is 0"
    )
    label = "the target is longer than the input allows"
    draft = begin(check, evidence, event, why, label=label, bad=bad)
    draft.because(*facts)
    draft.treat(first_at_origin(evidence, _ctc_cures) or _module_cure(evidence))
    return finish(draft, evidence)


def _length(lengths: object, row: int) -> int | None:
    if isinstance(lengths, torch.Tensor):
        return int(lengths.flatten()[row].item()) if lengths.numel() > row else None
    return int(lengths[row]) if isinstance(lengths, list | tuple) and len(lengths) > row else None


def _repeats(captured: Captured, row: int) -> int:
    """Equal labels in a row need a blank between them, and so one step more each."""
    targets, lengths = captured.argument(1), captured.argument(3)
    wanted = _length(lengths, row) or 0
    if targets.dim() == 2:
        labels = targets[row, :wanted]
    else:
        start = sum(_length(lengths, before) or 0 for before in range(row))
        labels = targets[start : start + wanted]
    return int((labels[1:] == labels[:-1]).sum().item())


def _ctc_cures(node: ast.expr, spot: Spot) -> Iterator[Cure]:
    if not isinstance(node, ast.Call) or operand_of(node, "ctc_loss") is None:
        return
    changed = copy.deepcopy(node)
    changed.keywords = [word for word in changed.keywords if word.arg != "zero_infinity"]
    changed.keywords.append(ast.keyword("zero_infinity", ast.Constant(True)))
    yield Cure("leave such items out", ast.unparse(changed), spot, same_values=False)


def _module_cure(evidence: NumbersEvidence) -> Treatment | None:
    """`nn.CTCLoss` is built elsewhere: change the living one for the trial."""
    step = evidence.step
    names = evidence.played.namespace if evidence.played is not None else {}
    held = [value for value in names.values() if isinstance(value, nn.Module)]
    losses = [module for root in held for module in root.modules() if isinstance(module, nn.CTCLoss)]
    if step is None or not losses:
        return None
    before = [module.zero_infinity for module in losses]
    try:
        for module in losses:
            module.zero_infinity = True
        played = step.again()
    finally:
        for module, value in zip(losses, before, strict=True):
            module.zero_infinity = value
    if not passes(played):
        return None
    title = "leave such items out: build the loss as nn.CTCLoss(..., zero_infinity=True)"
    return Treatment(title=title, proven=True, result=describe(played))


def _of_mask(evidence: NumbersEvidence) -> Draft | None:
    """An infinity that was written on purpose is counted in the loss."""
    scope, birth = evidence.scope, evidence.birth
    assert scope is not None
    assert birth is not None
    path = [scope.ops[index] for index in birth.path]
    counted = _first_to_count(path)
    if counted is None or counted.spot is None:
        return None
    by_label = counted.kind.startswith("nll_loss") or counted.kind in ("gather", "cross_entropy_loss")
    event = "a label whose class is masked out" if by_label else "a masked entry that is counted"
    why = (
        "the label names a class that was set to -inf, so its probability is 0"
        if by_label
        else f"`{counted.kind}` runs over entries that were set to -inf on purpose"
    )
    draft = begin(check, evidence, event, why, spot=counted.spot)
    spot = evidence.spot
    draft.mark(spot, "origin", "set to -inf here")
    draft.help("do not mask classes that the loss uses, or leave masked entries out of the loss")
    return finish(draft, evidence)


def _first_to_count(path: list[Op]) -> Op | None:
    """Coming from the mask, the first operation that gives fewer elements than it takes: it picks, sums or averages."""
    for op in reversed(path):
        if op.derived or not op.outputs or not op.inputs:
            continue
        taken = max(math.prod(value.geometry[1]) for value in op.inputs)
        given = max(math.prod(value.geometry[1]) for value in op.outputs)
        if given < taken:
            return op
    return path[0] if path else None
