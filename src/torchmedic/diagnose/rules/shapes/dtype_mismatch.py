"""An operation was given a tensor with a dtype that it does not accept.

What: matrix products, convolutions and normalisation need all their tensors in one dtype; indices must be integers;
means, norms and softmax need floating point; masks must be boolean; the target of a write keeps its own dtype, and
must be able to hold the number that is written.

Why: NumPy arrays are float64 and images uint8 by default, `torch.tensor([1, 2])` is int64, a part of a model was
converted with `.half()`, or a tensor left an autocast region in a lower precision. A mask of `-1e9` is beyond float16.

Cure: convert the tensor with the wrong dtype where it is made: `.float()`, `.long()`, `.bool()`, or
`.to(weight.dtype)`.
"""

from __future__ import annotations

import ast
import re

import torch

from torchmedic.diagnose.cures.edits import called, rewritten
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._dtype_giver import giver_of
from torchmedic.diagnose.rules.shapes._large_numbers import described, too_large
from torchmedic.diagnose.rules.shapes._odd_dtype import Odd, odd_one
from torchmedic.diagnose.words.tensors import (
    came_to_be,
    dtype,
    items_become,
    layer_name,
    layer_of,
    origin_of_whole,
    shape,
)
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Treatment
from torchmedic.replay.step.trial import Edit, attempt
from torchmedic.source.lookup.origins import user_argument
from torchmedic.source.spots import spot_of_node

_METHODS = {"float32": "float", "float64": "double", "float16": "half", "int64": "long", "bool": "bool"}
_ABOUT_DTYPE = re.compile(
    r"dtype|scalar type|Input type \(.*\) and (bias|weight) type|not implemented for '|can't be cast|"
    r"used as indices must be|can require gradients|boolean mask|boolean tensor|index tensor of type|floating.point|"
    r"can't convert np.ndarray of type|must have the type|bool tensors? is not supported|operator.invert|same datatype|"
    r"unsupported ScalarType",
    re.I,
)


@rule("TM160", "dtype-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError", "IndexError", "TypeError"} or not evidence.is_torchs:
        return None
    if (large := too_large(evidence)) is not None:
        return described(check.draft(evidence, "proven"), evidence, *large)
    if not _ABOUT_DTYPE.search(evidence.message) or not _from_torch(evidence):
        return None
    devices_differ = any(len({found.value.device.type for found in call.tensors}) > 1 for call in evidence.calls)
    if devices_differ and evidence.says("tensor)"):
        return None  # `torch.cuda.FloatTensor` and `torch.FloatTensor` differ in their device
    found = odd_one(evidence)
    if found is None:
        return _from_message(evidence)
    layer = layer_of(evidence, found.call)
    draft, name = check.draft(evidence, "proven"), layer_name(evidence, layer) if layer is not None else found.what
    draft.message = (
        f"a result of {found.wanted} cannot be written into a tensor of {dtype(found.tensor)}"
        if found.in_place
        else f"{name} was given {dtype(found.tensor)} where it takes {found.wanted}"
    )
    draft.cause = f"the tensor is {shape(found.tensor)} of {dtype(found.tensor)}{found.why}"
    made, label = giver_of(evidence, found.tensor), f"{dtype(found.tensor)}, not {found.wanted}"
    draft.at(made, *evidence.at_user_line("cause" if made is None else "surfaced", label))
    _came_from(evidence, found, draft, made)
    draft.treat(_converted(evidence, found))
    return draft.help(_advice(found, of_items=items_become(evidence, found.tensor) is not None))


def _converted(evidence: RaisedEvidence, found: Odd) -> Treatment | None:
    """The tensor converted where it is used, if the step then runs through."""
    wanted = _METHODS.get(found.wanted.split(" or ")[0])
    passed = user_argument(evidence.frames, found.tensor)
    if wanted is None or passed is None or found.in_place:
        return None
    frame, node = passed[0], passed[1].node
    step = StepFailure(evidence).step if node is not None and hasattr(node, "lineno") else None
    if step is None or node is None:
        return None
    text = f"{called(rewritten(frame.file, node), node)}.{wanted}()"
    verdict = attempt(step, Edit(spot_of_node(frame.file, node, frame.function), text))
    title = f"convert it where it is used: `{text}`"
    if not verdict.passed:
        return None
    return Treatment(title=title, safety="edit", proven=True, result=verdict.result, patch=verdict.patch)


def _from_torch(evidence: RaisedEvidence) -> bool:
    """Whether torch raised it: a tensor was given, or the innermost frame is torch's own."""
    return any(call.tensors for call in evidence.calls) or evidence.says("ndarray") or evidence.says("Tensors")


def _came_from(evidence: RaisedEvidence, found: Odd, draft: Draft, giver: Location | None) -> None:
    made = origin_of_whole(evidence, found.tensor)
    if made is None:
        return
    if giver is None:
        draft.at(made.location("origin", came_to_be(made, f"becomes {dtype(found.tensor)}")))
    words = ast.unparse(made.value) if made.value is not None else ""
    if found.tensor.dtype is torch.float64 and re.search(r"from_numpy|\bnp\.|numpy", words):
        draft.because("NumPy computes in float64 unless told otherwise, and torch keeps that")
    elif found.tensor.dtype is torch.int64 and re.search(r"\btensor\(|arange|randint", words):
        draft.because("torch makes int64 of whole numbers")


def _advice(found: Odd, *, of_items: bool) -> str:
    wanted = found.wanted.split(" or ")[0]
    if found.in_place:
        return "make a new tensor instead of writing into this one, or make this one floating point from the start"
    if wanted in _METHODS and of_items:
        return f"convert the items: `.{_METHODS[wanted]}()` for a tensor, `.astype(np.{wanted})` for a NumPy array"
    if wanted in _METHODS:
        return f"convert it where it is made: `.{_METHODS[wanted]}()`"
    return (
        f"convert it where it is made: `.to(torch.{wanted})`" if re.fullmatch(r"\w+\d*", wanted) else "convert it first"
    )


def _from_message(evidence: RaisedEvidence) -> Draft | None:
    first = evidence.message.strip().splitlines()[0][:160] if evidence.message.strip() else ""
    if not re.search(r"same dtype|scalar type|not implemented for '|can't be cast|should be the same|type", first):
        return None
    draft = check.draft(evidence, "likely", "an operation was given a tensor of a type that it does not take", first)
    draft.at(*evidence.at_user_line("cause", "a tensor of the wrong dtype"))
    return draft.help("compare the dtypes of the operands, and convert the odd one where it is made")
