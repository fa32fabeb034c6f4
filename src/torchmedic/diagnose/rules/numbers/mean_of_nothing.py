"""An average was computed over an empty set of elements.

What: the mean of an empty tensor is 0 / 0, which is NaN. The same holds for every loss that averages: over an empty
selection, or with all labels equal to `ignore_index`. `max`, `min` and their like raise for nothing.

Why: no element of this batch passed the filter, every label is padding, or all class weights that apply are zero.

Cure: skip such a batch or term, or divide by `max(count, 1)`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchmedic.diagnose.cures.numbers import Cure, expression, fill, first_at_origin, operand_of, written
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._operands import origin
from torchmedic.diagnose.rules.numbers._wording import begin, finish
from torchmedic.diagnose.words.tensors import made_here, shape
from torchmedic.evidence.bad_value_lines import Line
from torchmedic.evidence.dataset_item import fetch_again
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.preparation import line_in_collate, line_in_preparation
from torchmedic.replay.trace.microscope import Captured, Op, Spot
from torchmedic.source.syntax import has_line, nodes_in, syntax_tree

_MAX_SHOWN = 8  # class weights
_NLL = frozenset("nll_loss_forward nll_loss2d_forward nll_loss_nd".split())


@rule("TM211", "mean-of-nothing")
def check(evidence: NumbersEvidence | RaisedEvidence) -> Draft | None:
    if isinstance(evidence, RaisedEvidence):
        return _refused(evidence)
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None or op.derived:
        return None
    if op.kind in _NLL:
        return _ignored(evidence, captured)
    summed = _summed_loss(evidence, op)
    if summed is not None:
        return _ignored(evidence, summed)
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
        if maker.kind in _SELECTING:
            return "nothing is selected here" if own_line else ""  # else the line of the mean selects
        return f"empty here: {list(operand.shape)}"

    draft.at(origin(evidence, op.inputs[empty[0]], why))
    draft.treat(first_at_origin(evidence, _cures))
    return finish(draft, evidence)


def _refused(evidence: RaisedEvidence) -> Draft | None:
    """`max`, `argmin` and others have no result for nothing: torch raises."""
    call = evidence.call
    if call is None or not evidence.is_torchs or not any(evidence.says(words) for words in _NOTHING):
        return None
    empty = next((argument for argument in call.tensors if argument.value.numel() == 0), None)
    if empty is None:
        return None
    draft = check.draft(evidence, "proven", cause=f"`{call.op}` has no result for a tensor without elements")
    draft.message = f"`{call.op}` of nothing: `{empty.text}` is {shape(empty.value)}, which has no elements"
    draft.at(*evidence.at_user_line("cause", "nothing is given to it"))
    draft.at(made_here(evidence, empty.value, "becomes empty"))
    return draft.help("leave this out where there is nothing, or find out why nothing is left")


_NOTHING = (
    "numel() == 0",
    "to have non-zero size",
    "tensor with no elements",
    "non-empty list",
    "non-empty TensorList",
)
_SELECTING = frozenset("index masked_select index_select gather nonzero slice".split())


def _summed_loss(evidence: NumbersEvidence, op: Op) -> Captured | None:
    """The sum of a loss that is divided by a count, as libraries do that average over several micro-batches."""
    source = evidence.scope.source(op.inputs[0]) if op.kind == "div" and op.inputs and evidence.scope else None
    maker = evidence.scope.ops[source] if isinstance(source, int) and evidence.scope is not None else None
    return evidence.replay_with_values(maker) if maker is not None and maker.kind in _NLL else None


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
        return _weightless(evidence, weight, why, label)
    else:
        return None
    line = _line_of_labels(evidence, int(ignored))
    spot = Spot(line.file, line.line, None, None, None, "") if line is not None else None
    draft = begin(check, evidence, "a loss averaged over nothing", why, label=label, spot=spot)
    if spot is not None and evidence.spot is not None:
        draft.at(evidence.spot.location("surfaced", "the mean over no labels is NaN"))
    draft.because(f"the scores are {list(scores.shape)}, the labels {list(labels.shape)}")
    draft.treat(first_at_origin(evidence, _label_cures, int(ignored)))
    if line is not None:
        draft.help(f"keep at least one label in each item that is not {ignored}, or drop such items")
    return finish(draft, evidence)


def _weightless(evidence: NumbersEvidence, weight: torch.Tensor, why: str, label: str) -> Draft | None:
    """Class weights that are 0 where labels are: the line that made them."""
    line = line_in_preparation(
        evidence.frames,
        weight,
        [],
        functools.partial(_holds, functools.partial(_is_zero_where, (weight == 0).tolist())),
    )
    spot = Spot(line.file, line.line, None, None, None, "") if line is not None else None
    said = "the class weights become 0 here" if spot is not None else label
    draft = begin(check, evidence, "a loss averaged over nothing", why, label=said, spot=spot)
    if spot is not None and evidence.spot is not None:
        draft.at(evidence.spot.location("surfaced", label))
    draft.because(f"the class weights are {_listed(weight)}")
    is_rounded = line is not None and any(
        isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.FloorDiv) and has_line(node, line.line)
        for node in nodes_in(syntax_tree(line.file))
    )
    draft.help(
        "divide with `/`: `//` rounds down to whole numbers" if is_rounded else "give each class a weight above 0"
    )
    return finish(draft, evidence)


def _listed(weight: torch.Tensor) -> str:
    shown = ", ".join(f"{value:g}" for value in weight[:_MAX_SHOWN].tolist())
    return f"[{shown}{', ...' if len(weight) > _MAX_SHOWN else ''}]"


def _line_of_labels(evidence: NumbersEvidence, ignored: int) -> Line | None:
    """The line of the dataset or of the collate function after which all labels of an item are ignored."""
    known = evidence.incident.batch_indices
    items = tuple(known[0]) if len(known) == 1 and isinstance(known[0], list | tuple) else tuple(known)
    is_wrong = functools.partial(_holds, functools.partial(_are_all, ignored))
    fetched = fetch_again(items[0], is_wrong) if items and items[0] is not None else None
    line = fetched.line if fetched is not None else None
    return line or line_in_collate(evidence.frames, items, is_wrong)


def _holds(is_meant: Callable[[Any], bool], value: Any, depth: int) -> bool:
    """Whether a value is what is meant, or something that it holds."""
    try:
        if is_meant(value):
            return True
        parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return depth > 0 and any(_holds(is_meant, part, depth - 1) for part in parts[:64])
    except Exception:  # whatever a variable of the user's does when it is looked at
        return False


def _are_all(number: int, value: Any) -> bool:
    """Whether all elements of a tensor, an array or a list are one number."""
    if _is_array(value):
        return len(value) > 1 and bool((value == number).all())
    return isinstance(value, list) and len(value) > 1 and all(type(item) is int and item == number for item in value)


def _is_zero_where(zeros: list[bool], value: Any) -> bool:
    """Whether a tensor, an array or a list is 0 for these classes and for no other."""
    is_list = _is_array(value) or isinstance(value, list | tuple)
    return is_list and len(value) == len(zeros) and [bool(item == 0) for item in value] == zeros


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__")


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
