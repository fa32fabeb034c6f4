"""The gradients are cleared between `backward()` and `step()`: the weights never change.

What: `backward()` computes the gradients, `zero_grad()` clears them, and `step()` has nothing to apply. No error is
raised, and the model does not change.

Why: the calls are in the wrong order.

Cure: call `zero_grad()` before `backward()` or after `step()`, never in between.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import GradientsClearedBeforeStep
from torchmedic.diagnose.rule import loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Diagnosis


@loop_rule("TM604", "gradients-cleared-before-step", GradientsClearedBeforeStep)
def check(evidence: LoopEvidence, incident: GradientsClearedBeforeStep) -> Diagnosis | None:
    updates = incident.updates
    draft = check.draft(
        evidence,
        "proven",
        f"the weights do not change: the gradients were cleared before each of {count(updates, 'update')}",
        "between backward and step the gradients are cleared, so that step has nothing to apply",
    )
    draft.at(
        evidence.at("cause", incident.cause, "clears the gradients that backward has just computed", "zero_grad"),
        evidence.at("surfaced", incident.backward, "the gradients come from here", "backward"),
        evidence.at("surfaced", incident.update, "finds no gradient", "step"),
    )
    draft.because("so in every update that was seen, without exception")
    draft.help("move it before backward, or after step", safety="changes-training")
    return draft.done()
