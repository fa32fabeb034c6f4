"""Who gave the input of a layer its size: the model, so that the layer was built for a wrong size, or its caller."""

from __future__ import annotations

import ast
import math

import torch
from torch import nn

from torchmedic.diagnose.words.tensors import fed_by, origin_of_whole
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import raising_call
from torchmedic.source.syntax import callee

_ARRANGES = frozenset("view reshape permute transpose t movedim squeeze unsqueeze unfold".split())


def is_of_model(evidence: RaisedEvidence, layer: nn.Module, given: torch.Tensor) -> bool:
    """Whether other layers of the model give the input its size, and no call that only arranges it anew."""
    if given.dim() == 1 or math.prod(given.shape[1:]) == layer.__dict__.get("in_features"):
        return False
    if fed_by(evidence, layer):
        return True
    frame = evidence.user_frame
    if frame is None or frame.module is None:
        return False
    found = origin_of_whole(evidence, given)
    if found is None:
        return _is_computed_in_place(frame)
    if found.file != frame.file or not isinstance(found.node, ast.stmt):
        return False
    return frame.live.f_code.co_firstlineno < found.node.lineno < frame.line and not _is_arranged(found.value)


def _is_computed_in_place(frame: Frame) -> bool:
    """Whether the only argument of the failing call is a computation: `self.up(torch.cat([x, skip], 1))`."""
    call = raising_call(frame)
    nodes = [argument.node for argument in call.arguments] if call is not None else []
    return len(nodes) == 1 and isinstance(nodes[0], ast.Call | ast.BinOp) and not _is_arranged(nodes[0])


def _is_arranged(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and callee(value) in _ARRANGES
