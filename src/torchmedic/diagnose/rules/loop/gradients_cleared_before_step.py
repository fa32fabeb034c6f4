"""The gradients are cleared between `backward()` and `step()`: the weights never change.

What: `backward()` computes the gradients, `zero_grad()` clears them, and `step()` has nothing to apply. No error is
raised, and the model does not change.

Why: the calls are in the wrong order.

Cure: call `zero_grad()` before `backward()` or after `step()`, never in between.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import GradientsClearedBeforeStep
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM604", "gradients-cleared-before-step", GradientsClearedBeforeStep)
def check(evidence: LoopEvidence, incident: GradientsClearedBeforeStep) -> Draft | None:
    updates = incident.updates
    draft = check.draft(evidence, "proven")
    draft.message = f"the weights do not change: the gradients were cleared before each of {count(updates, 'update')}"
    draft.cause = "between backward and step the gradients are cleared, so that step has nothing to apply"
    draft.at(evidence.at("cause", incident.cause, "clears the gradients that backward has just computed", "zero_grad"))
    draft.at(evidence.at("surfaced", incident.backward, "the gradients come from here", "backward"))
    draft.at(evidence.at("surfaced", incident.update, "finds no gradient", "step"))
    draft.because("seen in every update so far")
    return draft.help("move it before `backward()`, or after `step()`", safety="changes-training")
