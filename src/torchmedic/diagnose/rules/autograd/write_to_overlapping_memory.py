"""A tensor was written to in place although several of its elements share one memory address.

What: `expand` and `broadcast_to` repeat a tensor without copying it: all repetitions share the same memory. A write
through such a tensor would store several different values at one address. A write whose source overlaps its target
(`x[1:] += x[:-1]`) has the same problem.

Why: `expand(...)`, `broadcast_to(...)`, `as_strided(...)` or overlapping slices, then `+=`, `x[...] = ...` or a
method that ends in `_`.

Cure: make the operation out of place, or write to a `.clone()`, which has its own memory.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._inplace_call import elsewhere, name_of, raising_spot, target_of
from torchmedic.diagnose.words.tensors import made_here, shape
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence


@rule("TM107", "write-to-overlapping-memory")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("written-to tensor", "single memory location"):
        return None
    target = target_of(evidence)
    tensor = target.tensor if target is not None else None
    repeated = _repeated(tensor) if tensor is not None else []
    draft = check.draft(evidence, "proven" if repeated or not evidence.says("more than one element") else "likely")
    draft.message = (
        f"{name_of(target)} was written to in place, but several of its elements are the same memory"
        if evidence.says("more than one element")
        else f"{name_of(target)} was written to in place from memory that overlaps it"
    )
    draft.cause = "one place in memory would be written several times, with different values"
    draft.at(*evidence.at_user_line("cause", "written to in place"))
    if tensor is not None and repeated:
        assert target is not None
        draft.at(made_here(evidence, tensor, "repeats its memory"))
        places = ", ".join(f"dimension {at} ({tensor.shape[at]} times)" for at in repeated)
        draft.because(f"of shape {shape(tensor)}, it repeats the same memory along {places}")
    failure = StepFailure(evidence)
    # A write to memory that overlaps means nothing, so there is no loss to compare with.
    treated = GraphTrials(failure, None).first(elsewhere(raising_spot(evidence)), same_loss=False)
    return draft.treat(treated, otherwise="make it out of place, or write to a `.clone()`")


def _repeated(tensor: torch.Tensor) -> list[int]:
    """The dimensions along which a tensor repeats its memory."""
    if tensor.layout is not torch.strided:
        return []
    return [
        at
        for at, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1 and not stride
    ]
