"""A call with `out=` received a tensor that requires a gradient.

What: `out=` writes a result into memory that already exists. Autograd cannot differentiate that, so a call with `out=`
accepts no tensor that requires a gradient.

Why: a buffer is reused to save memory, inside the model or in the loss.

Cure: assign the result instead: `y = torch.mul(x, 2)`. Keep `out=` for code under `torch.no_grad()`.
"""

from __future__ import annotations

from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._inplace_call import elsewhere, raising_spot
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence


@rule("TM121", "out-argument-with-gradient")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("out=", "don't support automatic differentiation"):
        return None
    call = evidence.call
    tracked = [one.text for one in call.tensors if one.value.requires_grad and one.text] if call is not None else []
    op = f"`{call.op}`" if call is not None and call.op else "an operation"
    draft = check.draft(evidence, "proven" if tracked else "likely")
    draft.message = f"{op} was to write into an `out=` tensor while gradients are recorded"
    draft.cause = "a write into memory that is there already cannot be differentiated"
    draft.at(*evidence.at_user_line("cause", "`out=` with a tensor that requires a gradient"))
    draft.because(f"`{tracked[0]}` requires a gradient" if tracked else "")
    treated = GraphTrials(StepFailure(evidence), None).first(elsewhere(raising_spot(evidence)))
    return draft.treat(
        treated, otherwise="assign the result instead of passing `out=`, or compute it under `torch.no_grad()`"
    )
