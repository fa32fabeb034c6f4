"""A tensor that was made in inference mode is used in training.

What: `torch.inference_mode()` makes tensors that autograd can never work with, because they keep no record of writes.
They can be read, but they cannot be saved for backward, written to outside inference mode, or made to require a
gradient.

Why: features, targets, a cache or a whole model were made under `inference_mode()` and are used in the training step.

Cure: use `torch.no_grad()` instead, or take a `.clone()` outside inference mode.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec
import torch

from torchmedic.diagnose.cures.edits import Candidate, copied
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._grad_mode import inference_switches
from torchmedic.diagnose.rules.autograd._inplace_call import elsewhere, raising_spot
from torchmedic.diagnose.words.tensors import made_here, shape
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.lookup.failing_call import UNKNOWN, Argument, raising_call


@rule("TM115", "inference-tensor-in-graph")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not (
        evidence.says("inference tensor", "inferencemode")
        or evidence.says("inference tensors cannot be saved for backward")
        or evidence.says("inference tensor", "outside")
    ):
        return None
    found = _inference_argument(evidence)
    name = f"`{found.text}`" if found is not None and found.text else "a tensor"
    written = not evidence.says("saved for backward")
    draft = check.draft(evidence, "proven" if found is not None else "likely")
    draft.message = f"{name} was made in inference mode and cannot be {'changed' if written else 'used'} in training"
    draft.cause = "autograd keeps no record of a tensor that was made in inference mode"
    switches = inference_switches()
    use = f"{name} is {'changed' if written else 'needed for backward'} here"
    if found is not None and isinstance(found.value, torch.nn.Parameter) and len(switches) == 1:
        # A weight: what has to change is where the model was made.
        draft.at(msgspec.structs.replace(switches[0], role="cause", label="the model is made in inference mode"))
        draft.at(*evidence.at_user_line("surfaced", use))
    draft.at(*evidence.at_user_line("cause", use))
    if found is not None:
        draft.at(made_here(evidence, found.value, "is made"))
        draft.because(f"{name} has shape {shape(found.value)}, and `is_inference()` is true of it")
    draft.at(*switches[:2])
    failure = StepFailure(evidence)
    spot = raising_spot(evidence)
    treated = None
    if spot is not None and failure.step is not None:
        candidates = elsewhere(spot) if written else _cloned(found, spot)
        treated = GraphTrials(failure).first(candidates, same_loss=False)
    draft.treat(treated)
    return draft.help(
        "or make it under `torch.no_grad()` instead" if treated else "make it under `torch.no_grad()`, or clone it"
    )


def _inference_argument(evidence: RaisedEvidence) -> Argument | None:
    """The inference tensor that the user's expression was given, or else the one that the raising call was given."""
    user = raising_call(evidence.user_frame) if evidence.user_frame is not None else None
    for argument in user.tensors if user is not None else ():
        if argument.value.is_inference():
            return argument
    for frame in reversed(evidence.library_frames):
        call = raising_call(frame)
        for argument in call.tensors if call is not None else ():
            if argument.value.is_inference():
                unread = [each for each in user.arguments if each.value is UNKNOWN] if user is not None else []
                # A library's expression cannot be edited. The user's can, if only one of its arguments is not known.
                node = unread[0].node if len(unread) == 1 else None
                return Argument(node, argument.value, argument.text)
    return None


def _cloned(found: Argument | None, spot: Spot) -> Iterator[Candidate]:
    node = found.node if found is not None else None
    if isinstance(node, ast.expr) and hasattr(node, "lineno"):
        yield "clone it outside of inference mode", copied(spot, node)
