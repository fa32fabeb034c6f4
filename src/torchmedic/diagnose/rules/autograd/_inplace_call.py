"""The write in place that torch refused: which tensor, and other source for its statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.edits import Candidate, out_of_place, rewritten, statement_at, whole
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.replay.step.trial import Edit
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.lookup.failing_call import Argument
from torchmedic.source.spots import spot_of_traced


def target_of(evidence: RaisedEvidence) -> Argument | None:
    """The tensor that the raising operation was to write to."""
    for call in evidence.calls:
        named = [argument for argument in call.arguments if argument.name == "out"]
        for argument in [*named, *call.arguments[:1]]:
            if argument.tensor is not None:
                return argument
    return None


def name_of(target: Argument | None) -> str:
    return f"`{target.text}`" if target is not None and target.text else "the tensor"


def raising_spot(evidence: RaisedEvidence) -> Spot | None:
    return spot_of_traced(evidence.user_frame) if evidence.user_frame is not None else None


def untracked(spot: Spot | None) -> Iterator[Candidate]:
    """The statement at a spot under `no_grad`."""
    node = statement_at(spot) if spot is not None else None
    if node is None or spot is None or not isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign):
        return
    edit = Edit(whole(spot, node), f"with torch.no_grad(): {rewritten(spot.file, node)}")
    yield "write to it under `torch.no_grad()`", edit


def elsewhere(spot: Spot | None) -> Iterator[Candidate]:
    """The statement at a spot without a write in place."""
    if spot is not None:
        yield from out_of_place(spot)


def mentions_gradient(spot: Spot | None) -> bool:
    """Whether a statement is an update: it reads `.grad`."""
    node = statement_at(spot) if spot is not None else None
    return node is not None and any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in ast.walk(node))


def is_trained(tensor: torch.Tensor, evidence: RaisedEvidence) -> bool:
    """Whether a tensor is, or is a part of, a parameter."""
    whole_tensor = tensor._base if tensor._base is not None else tensor
    optimizers = evidence.incident.agent.clock.optimizers if evidence.incident.agent is not None else []
    return isinstance(whole_tensor, torch.nn.Parameter) or any(
        whole_tensor is parameter for parameter in parameters_of(*optimizers)
    )
