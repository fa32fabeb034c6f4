"""`requires_grad` was changed on a tensor that was computed from others.

What: whether a computed tensor requires a gradient follows from the tensors it was computed from. `requires_grad` can
be changed only on leaves, which are tensors that were not produced by an operation.

Why: the script tries to stop gradients at an activation by setting `requires_grad` to False, as one does with weights.

Cure: use `x = x.detach()` for the activation; freeze the weights themselves, or compute the activation under
`torch.no_grad()`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.edits import Candidate, rewritten
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import made_here
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.trial import Edit
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import raising_call, read
from torchmedic.source.spots import spot_of_node


@rule("TM122", "requires-grad-of-non-leaf")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("only change requires_grad flags of leaf"):
        return None
    frame = evidence.user_frame
    node, tensor = _subject(frame) if frame is not None else (None, None)
    name = f"`{ast.unparse(node)}`" if node is not None else "a computed tensor"
    draft = check.draft(evidence, "proven" if tensor is not None and not tensor.is_leaf else "likely")
    draft.message = f"`requires_grad` of {name} was changed, which was computed from other tensors"
    draft.cause = "whether a computed tensor has a gradient follows from what it was computed from"
    draft.at(*evidence.at_user_line("cause", f"{name} is not a leaf"))
    if tensor is not None:
        draft.at(made_here(evidence, tensor, "is computed"))
        draft.because(f"it was made by `{type(tensor.grad_fn).__name__}`" if tensor.grad_fn is not None else "")
    treated = None
    if frame is not None and node is not None:
        treated = GraphTrials(StepFailure(evidence)).first(_detached(frame, node), same_loss=False)
    return draft.treat(
        treated,
        otherwise=f"use `{ast.unparse(node)}.detach()` from here on" if node is not None else "use `x.detach()`",
    )


def _subject(frame: Frame) -> tuple[ast.expr | None, torch.Tensor | None]:
    owner: ast.expr | None = None
    match frame.statement:
        case ast.Assign(targets=[ast.Attribute(value=value, attr="requires_grad")]):
            owner = value
    call = raising_call(frame) if owner is None else None
    if call is not None and call.arguments:
        owner = call.arguments[0].node
    tensor = read(owner, frame) if owner is not None else None
    return owner, tensor if isinstance(tensor, torch.Tensor) else None


def _detached(frame: Frame, node: ast.expr) -> Iterator[Candidate]:
    statement = frame.statement
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(statement, ast.Expr | ast.Assign):
        name = rewritten(frame.file, node)
        edit = Edit(spot_of_node(frame.file, statement, frame.function), f"{name} = {name}.detach()")
        yield "go on without its history", edit
