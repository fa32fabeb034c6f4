"""The target of a loss has a dtype that the loss does not accept.

What: `cross_entropy` and `nll_loss` take class indices as int64, or one probability per class in floating point.
`binary_cross_entropy` takes its target in the floating-point dtype of its input.

Why: labels read as float or int32 (from a CSV file, from NumPy), one-hot labels made by `one_hot`, which are int64, or
0/1 labels as int64 for a binary loss. Scores of the shape of the labels (predicted classes, or a model with one output)
also make the labels look like probabilities of the wrong dtype.

Cure: use `target.long()` for class indices, `target.float()` for probabilities and binary labels.
"""

from __future__ import annotations

import ast

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._losses import CLASSIFYING, Given, given_to_loss
from torchmedic.diagnose.words.tensors import dtype, items_become, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.lookup.failing_call import read
from torchmedic.source.lookup.origins import origin_of

_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


@rule("TM161", "wrong-target-dtype")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError", "NotImplementedError"}:
        return None
    given = given_to_loss(evidence, *CLASSIFYING, *_BINARY, "multi_margin_loss", "multilabel_margin_loss")
    if given is None:
        return _noticed_in_backward(evidence)
    wanted = _wanted(given)
    if wanted is None:
        return None
    if given.loss in CLASSIFYING and wanted != "int64" and (given.input.dim() == 1 or given.input.shape[1] == 1):
        return _without_classes(evidence, given)
    # Whole numbers are usual labels of two classes: a loss of the user's
    # own converts them, and not the dataset.
    at_call = given.loss in _BINARY and not evidence.is_in_library
    items = items_become(evidence, given.target, "origin" if at_call else "cause")
    of_items = items is not None and items.role == "cause"
    at_loss = evidence.at_user_line("surfaced" if of_items else "cause", f"{dtype(given.target)}, not {wanted}")
    return _diagnosis(evidence, given, wanted, (items, *at_loss) if of_items else (*at_loss, items))


def _wanted(given: Given) -> str | None:
    """The dtype that the target should have; None if it has it, or if its shape is what is wrong."""
    if given.loss in _BINARY:
        return None if given.target.dtype == given.input.dtype else dtype(given.input)
    labels, scores = list(given.target.shape), list(given.input.shape)
    if labels == given.expected_target or given.loss not in CLASSIFYING:
        whole = (torch.int64, torch.uint8) if given.loss in CLASSIFYING else (torch.int64,)
        return None if given.target.dtype in whole else "int64"
    if labels == scores and not given.target.is_floating_point():
        return dtype(given.input)
    return None


def _diagnosis(evidence: RaisedEvidence, given: Given, wanted: str, places: tuple[Location | None, ...]) -> Draft:
    indices = wanted == "int64"
    draft = check.draft(evidence, "proven")
    draft.message = f"`{given.loss}` was given a target of {dtype(given.target)} where it takes {wanted}"
    draft.cause = f"the target is {shape(given.target)} of {dtype(given.target)}; " + (
        "class indices are int64" if indices else f"the input is {dtype(given.input)}, and so must the target be"
    )
    draft.at(*places)
    draft.at(made_here(evidence, given.target, f"becomes {dtype(given.target)}", whole=True))
    if list(given.target.shape) == list(given.input.shape) and given.loss in CLASSIFYING:
        draft.because("a target of the shape of the scores is read as one probability per class")
        draft.help("pass the class indices themselves, or convert these probabilities: `target.float()`")
    else:
        draft.help(f"convert the target: `target.{'long' if indices else 'to(input.dtype)'}{'()' if indices else ''}`")
    return draft


def _without_classes(evidence: RaisedEvidence, given: Given) -> Draft:
    """Scores of the shape of the labels: the target is then read as probabilities, and torch complains of its dtype."""
    sizes = shape(given.input)
    draft = check.draft(evidence, "proven")
    draft.message = f"`{given.loss}` was given one score per sample, {sizes}, where it takes one per class"
    draft.cause = f"the scores are {sizes} as the labels are: they have no dimension with several classes"
    draft.at(*evidence.at_user_line("cause", f"scores {sizes}"))
    draft.at(made_here(evidence, given.input, f"becomes {sizes}", whole=True))
    draft.because("a target of the shape of the scores is read as one probability per class, which is floating point")
    draft.help("pass one score per class: no `argmax` before the loss, and as many outputs as there are classes")
    return draft.help("or, for two classes and one score, use `binary_cross_entropy_with_logits`")


def _noticed_in_backward(evidence: RaisedEvidence) -> Draft | None:
    """Some versions compute such a loss and complain in its backward; then the call that made the loss is read."""
    frame = evidence.user_frame
    if not evidence.says("Found dtype", "but expected") or frame is None or not isinstance(frame.node, ast.Call):
        return None
    if evidence.inside("_engine_run_backward", "backward") is None or not isinstance(frame.node.func, ast.Attribute):
        return None
    made = origin_of(evidence.frames, frame, frame.node.func.value)
    call = made.value if made is not None else None
    if made is None or not isinstance(call, ast.Call):
        return None
    values = [read(argument, frame) for argument in (*call.args, *(part.value for part in call.keywords))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) != 2 or tensors[0].dtype == tensors[1].dtype or not tensors[0].is_floating_point():
        return None
    given = Given(ast.unparse(call.func), tensors[0], tensors[1])
    wanted = dtype(tensors[0])
    place = made.location("cause", f"the target is {dtype(tensors[1])}, not {wanted}")
    return _diagnosis(evidence, given, wanted, (place, *evidence.at_user_line("surfaced", "noticed here")))
