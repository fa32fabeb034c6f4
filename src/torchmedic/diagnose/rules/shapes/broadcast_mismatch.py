"""An elementwise operation was given two tensors whose shapes cannot be broadcast.

What: an elementwise operation aligns the shapes from the right. In every dimension the sizes must be equal, or one of
them must be 1. The target of a write (`+=`, `x[mask] = ...`) must already have the full shape. Some losses require
equal shapes.

Why: a missing or additional dimension (`[N]` against `[N, 1]`), a mask or position table made for another length, a
residual branch that changes the number of channels, a target whose size differs from the prediction.

Cure: `squeeze`, `unsqueeze`, `transpose` or cut one of the tensors so that the sizes agree.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._elementwise import ELEMENTWISE, Misfit, misfit_of, misfit_of_loss, misfit_of_mask
from torchmedic.diagnose.rules.shapes._shapes import by_message
from torchmedic.diagnose.words.tensors import argument_text, made_here, shape
from torchmedic.evidence.batch_entry import entry_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layers import copied_layer_built_at


@rule("TM153", "broadcast-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError", "IndexError", "AssertionError"}:
        return None
    found = misfit_of_loss(evidence) or misfit_of_mask(evidence)
    if found is None:
        # `mse_loss` says more than the `broadcast_tensors` inside it.
        for call in sorted(evidence.calls, key=lambda call: call.op == "broadcast_tensors"):
            found = misfit_of(call) if call.op.rstrip("_") in ELEMENTWISE else None
            if found is not None:
                break
    return _proven(evidence, found) if found is not None else _from_message(evidence)


def _proven(evidence: RaisedEvidence, found: Misfit) -> Draft:
    a, b = found.left.value, found.right.value
    draft = check.draft(evidence, "proven")
    draft.message = f"{found.what} of {shape(a)} and {shape(b)}: {found.why}"
    draft.cause = f"the shapes are {argument_text(found.left)} and {argument_text(found.right)}; {found.why}"
    # A library runs the loop, and its model was given the target: the line that made the target is to blame.
    entry = entry_of(evidence.frames, b) if evidence.is_in_library and isinstance(b, torch.Tensor) else None
    if entry is not None:
        dtype = str(b.dtype).removeprefix("torch.")
        draft.at(node_location("cause", *entry[1:], f"`{entry[0]}` becomes {shape(b)} of {dtype}"))
        if b.is_floating_point() and b.dim() == a.dim() - 1:
            draft.help("give one class for each item as integers, of `torch.long`, or one number for each class")
    draft.at(*evidence.at_user_line("cause" if entry is None else "surfaced", found.why))
    for side in (found.left, found.right):
        if side.tensor is not None:
            draft.at(made_here(evidence, side.value, f"becomes {shape(side.value)}"))
    if found.is_batch_first:
        draft.at(copied_layer_built_at("origin", "batch_first=False, so the first dimension is taken for the steps"))
        draft.because(
            "the mask fits if the first dimension is the batch, and the attention takes the second one for it"
        )
        draft.help("build the layer with `batch_first=True`")
    elif found.squeezed:
        draft.because(f"without its dimensions of size 1, {shape(found.squeezed)} is the shape of the other one")
        draft.help("drop that dimension with `squeeze(-1)`, or add it to the other tensor with `unsqueeze(-1)`")
    elif "an index of" in found.why:
        draft.help("give the index the missing dimension, as in `q.gather(1, actions.unsqueeze(1)).squeeze(1)`")
    elif found.is_comparison and abs(a.dim() - b.dim()) == 1 and a.shape[:1] == b.shape[:1]:
        draft.help("compare one value per row: take `argmax(1)` of the tensor that has a row of scores")
    else:
        draft.help("make the sizes agree: squeeze, unsqueeze, transpose or cut one of the two")
    return draft


_MESSAGES = (
    (r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dimension (\d+)",
     "{0} meets {1} in dimension {2}"),
    (r"output with shape (\[[\d, ]*\]) doesn't match the broadcast shape (\[[\d, ]*\])", "{1} does not fit into {0}"),
    (r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\) at non-singleton dimension (\d+)",
     "{1} meets {0} in dimension {2}"),
    (r"shape of the mask (\[[\d, ]*\]) at index \d+ does not match the shape of the indexed tensor (\[[\d, ]*\])",
     "a mask of {0} meets a tensor of {1}"),
    (r"value tensor of shape (\[[\d, ]*\]) cannot be broadcast to indexing result of shape (\[[\d, ]*\])",
     "{0} does not fit into {1}"),
    (r"indexing tensors could not be broadcast together with shapes (\[[\d, ]*\]), (\[[\d, ]*\])", "{0} meets {1}"),
    (r"Shape mismatch: objects cannot be broadcast to a single shape", "the shapes do not broadcast"),
)  # fmt: skip
_ADVICE = "make the sizes agree: squeeze, unsqueeze, transpose or cut one of the two"


def _from_message(evidence: RaisedEvidence) -> Draft | None:
    draft = by_message(check, evidence, _MESSAGES, "shapes that do not broadcast: {}", _ADVICE)
    if draft is None:
        return None
    call = evidence.calls[-1] if evidence.calls else None
    for known in call.tensors if call is not None else []:
        draft.because(f"{argument_text(known)} is one of the operands")
        draft.at(made_here(evidence, known.value, f"becomes {shape(known.value)}"))
    return draft
