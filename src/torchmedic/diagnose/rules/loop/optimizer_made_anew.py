"""An optimizer with a memory is built for each single update, so its moving averages are lost.

What: each update of the same weights is the first update of a new optimizer. Adam has no average of earlier gradients
and no estimate of their size, and SGD has no velocity.

Why: the optimizer is built inside of the training loop, or in the function of a single step. The first update of Adam
changes each weight by the learning rate, whatever the size of the gradient, so training is noisy and does not settle.

Cure: build the optimizer once, before the loop.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import OptimizerMadeAnew
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM655", "optimizer-made-anew", OptimizerMadeAnew)
def check(evidence: LoopEvidence, incident: OptimizerMadeAnew) -> Draft | None:
    draft = check.draft(evidence, "proven")
    draft.message = f"`{incident.kind}` forgets everything after each update: a new optimizer is built for each step"
    draft.cause = "the moving averages of the gradients are part of the optimizer, and are lost with it"
    draft.at(
        evidence.at("cause", incident.cause, "is run in each step"),
        evidence.at("surfaced", incident.update, "the first update of this optimizer", "step"),
    )
    draft.because(f"{count(incident.updates, 'update')} of the same weights, each by another optimizer, were seen")
    return draft.help("build the optimizer once, before the loop", safety="changes-training").rated("warning")
