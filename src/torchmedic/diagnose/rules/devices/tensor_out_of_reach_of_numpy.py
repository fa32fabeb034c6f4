"""A tensor that NumPy cannot read was turned into a NumPy array.

What: a NumPy array shares the memory of its tensor, which must hold all elements in host memory. That of a tensor on
a GPU does not, nor that of a sparse tensor. A result of `conj()` is conjugated only when torch reads it.

Why: predictions, losses or labels go from a GPU to a metric, a plot or a list. `np.array(t)`, `np.mean([t, t])` and
plotting functions call `numpy()` on each tensor.

Cure: copy the tensor to the host first, `t.detach().cpu().numpy()`; a single number is `t.item()`. For the other
tensors call `t.to_dense()`, `t.resolve_conj()` or `t.resolve_neg()`.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import made_here, shape
from torchmedic.evidence.exception import RaisedEvidence


@rule("TM317", "tensor-out-of-reach-of-numpy")
def check(evidence: RaisedEvidence) -> Draft | None:
    call = evidence.find("numpy", "__array__")
    tensor = call.arguments[0].tensor if call is not None and call.arguments else None
    obstacle = _obstacle(tensor) if tensor is not None and evidence.kinds & {"TypeError", "RuntimeError"} else None
    if tensor is None or obstacle is None:
        return None
    reason, method = obstacle
    draft = check.draft(evidence, "proven")
    draft.message = f"NumPy cannot read a tensor that {reason}"
    draft.cause = f"the tensor of shape {shape(tensor)} {reason}; NumPy reads plain memory of the host only"
    draft.at(*evidence.at_user_line("cause", f"this tensor {reason}"))
    draft.at(made_here(evidence, tensor, "is made"))
    if tensor.numel() == 1 and method == "cpu":
        return draft.help("take the number with `.item()`")
    attached = "detach()." if tensor.requires_grad else ""
    return draft.help(f"convert the tensor before: `.{attached}{method}().numpy()`")


def _obstacle(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why NumPy cannot read a tensor, and the method whose result NumPy can read."""
    if tensor.device.type == "meta":
        return None  # such a tensor has no values at all
    if tensor.layout is not torch.strided:
        return "is sparse", "to_dense"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}", "cpu"
    if tensor.is_conj():
        return "is conjugated only when it is read", "resolve_conj"
    return ("is negated only when it is read", "resolve_neg") if tensor.is_neg() else None
