"""All parameters of the optimizer are frozen: the weights never change.

What: `requires_grad` is off for all parameters of the optimizer. They get no gradient, and `step()` does nothing.

Why: the parameters were frozen after, or before, they were given to the optimizer, and the trainable parameters were
not given to any optimizer.

Cure: freeze the parameters that should not change, and give the optimizer the others.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import FrozenOptimizer
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM609", "frozen-optimizer", FrozenOptimizer)
def check(evidence: LoopEvidence, incident: FrozenOptimizer) -> Draft | None:
    draft = check.draft(evidence, "proven")
    draft.message = f"the weights do not change: all {count(incident.held, 'parameter')} of the optimizer are frozen"
    draft.cause = "requires_grad is off for every parameter that an optimizer holds, so that no update has a gradient"
    draft.at(evidence.at("cause", incident.cause, "requires_grad is False for all of them"))
    draft.at(evidence.at("surfaced", incident.update, "finds no gradient", "step"))
    draft.because(
        f"{count(incident.updates, 'update')} had no gradient to apply",
        f"the loss reaches {count(incident.reached, 'parameter')} that no optimizer has "
        f"({count(incident.elements, 'weight')})",
    )
    return draft.help("give the optimizer the parameters that should be trained", safety="changes-training")
