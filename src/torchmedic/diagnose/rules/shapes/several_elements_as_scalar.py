"""A tensor with several elements was used as one Python number.

What: `.item()`, `float()`, `int()`, `f"{loss:.4f}"`, `torch.tensor([...])` and Lightning's `self.log` need one number.
A tensor can be converted only if it has exactly one element.

Why: a loss that was not reduced (`reduction='none'`), a batch of values instead of one value, or
`torch.tensor(tensors)` instead of `torch.stack(tensors)`.

Cure: reduce the tensor (`.mean()`, `.sum()`), select one element, or use `torch.stack` or `.tolist()`.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence

_SAYS = (
    ("cannot be converted to scalar",),
    ("only one element tensors can be converted",),
    ("only integer tensors of a single element",),
    ("unsupported format string passed to tensor",),
    ("the tensor must have a single element",),  # of a metric that Lightning logs
)


@rule("TM159", "several-elements-as-scalar")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError", "TypeError"}:
        return None
    if not any(evidence.says(*fragments) for fragments in _SAYS):
        return None
    tensors = [found.value for call in evidence.calls for found in call.tensors if found.value.numel() != 1]
    frame = evidence.inside("__format__")
    if frame is not None and isinstance(shown := frame.variables.get("self"), torch.Tensor) and shown.numel() != 1:
        tensors.insert(0, shown)
    if not tensors:
        draft = check.draft(
            evidence, "likely", "a tensor with several elements was used as one number", evidence.message[:200]
        )
        draft.at(*evidence.at_user_line("cause", "more than one element"))
        return draft.help("reduce it to one number first: `.mean()` or `.sum()`")
    tensor = tensors[0]
    elements = count(tensor.numel(), "element")
    draft = check.draft(
        evidence, "proven", f"a tensor with {elements} was used as one number", f"its shape is {shape(tensor)}"
    )
    draft.at(*evidence.at_user_line("cause", f"{shape(tensor)}: {elements}"))
    draft.at(made_here(evidence, tensor, f"becomes {shape(tensor)}"))
    if evidence.find("tensor", "as_tensor", "FloatTensor", "LongTensor") is not None:
        draft.help("join the tensors with `torch.stack(...)`, or with `torch.cat(...)`")
    else:
        draft.help("reduce it first (`.mean()`, `.sum()`), pick one element, or use `.tolist()`")
    return draft
