"""A plain number that was to be written into a tensor whose dtype cannot hold it: `-1e9` as a mask in float16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.edits import Candidate
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.tensors import dtype, shape
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.trial import Edit
from torchmedic.source.lookup.failing_call import Argument
from torchmedic.source.spots import spot_of_node


def too_large(evidence: RaisedEvidence) -> tuple[torch.Tensor, Argument] | None:
    """The tensor, and the number that its dtype cannot hold."""
    if not evidence.says("without overflow"):
        return None
    for call in evidence.calls:
        tensor = next((each.tensor for each in call.arguments[:1] if each.tensor is not None), None)
        if tensor is None or tensor.is_complex() or tensor.dtype is torch.bool:
            continue
        limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        for each in call.arguments[1:]:
            is_number = isinstance(each.value, int | float) and not isinstance(each.value, bool)
            if is_number and not limits.min <= each.value <= limits.max:
                return tensor, each
    return None


def described(draft: Draft, evidence: RaisedEvidence, tensor: torch.Tensor, number: Argument) -> Draft:
    """The diagnosis of a number that does not fit, with a cure that was tried where a float was to be very small."""
    name, kind = f"{number.value:g}", dtype(tensor)
    limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
    draft.message = f"{name} does not fit into a tensor of {kind}"
    draft.cause = f"{kind} holds numbers from {limits.min:g} to {limits.max:g}; the tensor is {shape(tensor)}"
    draft.at(*evidence.at_user_line("cause", f"{name} is beyond {kind}"))
    trials = GraphTrials(StepFailure(evidence), None)
    treated = trials.first(_within(evidence, tensor, number), same_loss=False) if tensor.is_floating_point() else None
    return draft.treat(treated, otherwise=f"use a number that {kind} can hold, or convert the tensor: `.float()`")


def _within(evidence: RaisedEvidence, tensor: torch.Tensor, number: Argument) -> Iterator[Candidate]:
    """The end of the dtype's own range instead of the number."""
    frame = evidence.user_frame
    if frame is None or not isinstance(number.node, ast.expr):
        return
    end = "min" if number.value < 0 else "max"
    text = f"torch.finfo({tensor.dtype}).{end}"
    yield "use the end of the range of the dtype", Edit(spot_of_node(frame.file, number.node, frame.function), text)
