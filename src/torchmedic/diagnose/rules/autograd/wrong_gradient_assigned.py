"""A gradient was assigned to a tensor with another shape, dtype or device.

What: `tensor.grad = gradient` requires a gradient with the shape, dtype and device of the tensor.

Why: gradients that were collected, averaged or computed by hand were paired with the wrong parameters, or kept in
another precision or on another device.

Cure: pair every parameter with its own gradient, and convert the gradient with `gradient.to(tensor)` before the
assignment.
"""

from __future__ import annotations

import ast

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import dtype, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import read


@rule("TM123", "wrong-gradient-assigned")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.says("assign", "grad") or not evidence.kinds & {"RuntimeError", "TypeError"}:
        return None
    if not evidence.says("assign a gradient") and not evidence.says("assigned grad"):
        return None
    frame = evidence.user_frame
    tensor, gradient = _pair(frame) if frame is not None else (None, None)
    difference = _difference(tensor, gradient) if tensor is not None and gradient is not None else ""
    draft = check.draft(evidence, "proven" if difference else "likely")
    draft.message = (
        f"a gradient was assigned to a tensor that it does not fit: {difference}"
        if difference
        else "a gradient was assigned to a tensor that it does not fit"
    )
    draft.cause = "a gradient has the shape, the dtype and the device of its tensor"
    draft.at(*evidence.at_user_line("cause", difference or "assigned here"))
    if gradient is not None:
        draft.at(made_here(evidence, gradient, f"becomes {shape(gradient)} {dtype(gradient)}"))
    if tensor is not None and gradient is not None and tensor.shape == gradient.shape:
        draft.help("convert the gradient first: `gradient.to(tensor)`")
    else:
        draft.help("pair every parameter with its own gradient")
    return draft


def _pair(frame: Frame) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    match frame.statement:
        case ast.Assign(targets=[ast.Attribute(value=owner, attr="grad")], value=given):
            tensor, gradient = read(owner, frame), read(given, frame)
            return (
                tensor if isinstance(tensor, torch.Tensor) else None,
                gradient if isinstance(gradient, torch.Tensor) else None,
            )
    return None, None


def _difference(tensor: torch.Tensor, gradient: torch.Tensor) -> str:
    if tensor.shape != gradient.shape:
        return f"{shape(gradient)} to {shape(tensor)}"
    if tensor.dtype != gradient.dtype:
        return f"{dtype(gradient)} to {dtype(tensor)}"
    return f"on {gradient.device} to one on {tensor.device}" if tensor.device != gradient.device else ""
