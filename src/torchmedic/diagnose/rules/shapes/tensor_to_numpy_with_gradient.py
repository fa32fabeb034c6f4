"""A tensor that requires a gradient was turned into a NumPy array.

What: NumPy does not support gradients, so torch does not convert a tensor that is part of a graph. `np.array(t)`,
`np.mean([t, t])` and plotting functions all call `numpy()` on the tensor.

Why: an output or a loss that is logged, plotted or measured still belongs to the graph.

Cure: use `t.detach().cpu().numpy()`; for a single number `t.item()`; for a whole evaluation `with torch.no_grad():`.
"""

from __future__ import annotations

import ast

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Call, read
from torchmedic.source.syntax import nodes_in


@rule("TM158", "tensor-to-numpy-with-gradient")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("numpy()", "requires grad"):
        return None
    call = evidence.find("numpy", "__array__")
    tensor = call.arguments[0].tensor if call is not None and call.arguments else None
    tracked = call is not None and _is_tracked(call)
    described = f" of shape {shape(tensor)}" if tensor is not None else ""
    draft = check.draft(evidence, "proven" if tracked else "likely")
    draft.message = f"a tensor{described} that requires a gradient was turned into a NumPy array"
    draft.cause = "it is part of a graph, which NumPy cannot follow"
    draft.at(*evidence.at_user_line("cause", "this tensor requires a gradient"))
    if tensor is not None:
        draft.at(made_here(evidence, tensor, "is made"))
    if tensor is not None and tensor.numel() == 1:
        draft.help("take the number with `.item()`")
    else:
        draft.help("leave the graph first: `.detach().cpu().numpy()`")
    return draft


def _is_tracked(call: Call) -> bool:
    """The tensor itself requires a gradient, or what it is computed from in the same expression does."""
    first = call.arguments[0] if call.arguments else None
    if first is None:
        return False
    if first.tensor is not None and first.value.requires_grad:
        return True
    values = (read(node, call.frame) for node in nodes_in(first.node) if isinstance(node, ast.Name | ast.Attribute))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
