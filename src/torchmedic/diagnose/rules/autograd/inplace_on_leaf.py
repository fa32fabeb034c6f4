"""A leaf tensor that requires a gradient was written to in place.

What: a leaf is a tensor that was not produced by an operation: a weight, or an input that requires a gradient. Its
gradient is computed with respect to its current value, so autograd does not allow that value to be overwritten while it
records.

Why: an update or an initialisation written by hand without `torch.no_grad()`, or an input that is changed in place
after `requires_grad_()`.

Cure: change weights under `torch.no_grad()`; make a new tensor where the change is a part of the model.
"""

from __future__ import annotations

from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._inplace_call import (
    elsewhere,
    is_trained,
    mentions_gradient,
    name_of,
    raising_spot,
    target_of,
    untracked,
)
from torchmedic.diagnose.words.tensors import shape
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence


@rule("TM105", "inplace-on-leaf")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says(
        "leaf variable that requires grad", "in-place operation"
    ):
        return None
    target = target_of(evidence)
    tensor = target.tensor if target is not None else None
    base = tensor._base if tensor is not None and tensor._base is not None else tensor
    is_leaf = base is not None and base.is_leaf and base.requires_grad
    name = name_of(target) if is_leaf else "a tensor"
    what = "a part of a weight" if evidence.says("a view of a leaf") else "a leaf"
    draft = check.draft(evidence, "proven" if is_leaf else "likely")
    draft.message = (
        f"{name}, {what} that requires a gradient, was written to in place"
        if is_leaf
        else f"{what} that requires a gradient was written to in place"
    )
    draft.cause = (
        "its gradient belongs to the value that it has, so it must not be overwritten while gradients are recorded"
    )
    draft.at(*evidence.at_user_line("cause", "written to in place while gradients are recorded"))
    if tensor is not None and is_leaf:
        kind = "parameter" if is_trained(tensor, evidence) else "leaf"
        draft.because(f"{name} is a {kind} of shape {shape(tensor)} with requires_grad=True")
    failure = StepFailure(evidence)
    spot = raising_spot(evidence)
    weight = tensor is not None and is_trained(tensor, evidence)
    trials = GraphTrials(failure, None)
    update = weight or mentions_gradient(spot)
    ways = (untracked, elsewhere) if update else (elsewhere, untracked)
    treated = None
    for way in ways if failure.step is not None else ():
        # A step that takes gradients on the way has no loss without them.
        treated = treated or trials.first(way(spot), same_loss=trials.wanted_loss() is not None)
    return draft.treat(
        treated,
        otherwise="change it under `torch.no_grad()`" if update else "compute a new tensor instead: `x = x + ...`",
    )
