"""The mean losses of several micro-batches are added up, so the gradients are too large by that factor.

What: the loop calls `backward()` for N batches before it updates the weights. Each loss is a mean over its batch, so
the sum of their gradients is N times the gradient of one large batch. With SGD this has the effect of N times the
learning rate.

Why: `loss / N` was left out when accumulation was added.

Cure: divide the loss by the number of micro-batches, or choose the learning rate with that factor in mind. Optimizers
such as Adam, which divide by the size of the gradients, are not reported.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import LossNotDivided
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM603", "loss-not-divided", LossNotDivided)
def check(evidence: LoopEvidence, incident: LossNotDivided) -> Draft | None:
    size = incident.size
    draft = check.draft(evidence, "likely")
    draft.message = f"the gradients are {size} times as large as those of one batch: {size} mean losses are added up"
    draft.cause = (
        f"each update follows {size} calls of backward, each with a loss that is a mean and is not divided by {size}"
    )
    draft.at(evidence.at("cause", incident.cause, f"called {size} times per update, with a mean each time", "backward"))
    draft.at(evidence.at("surfaced", incident.update, f"as with {size} times the learning rate", "step"))
    draft.because(f"seen in {incident.cycles} updates, with {size} batches of one dataset each")
    draft.because("nothing has divided the gradients before the update, and they were not clipped")
    name = evidence.receiver(incident.cause, "backward") or "loss"
    draft.help(f"divide each loss: `({name} / {size}).backward()`", safety="changes-training")
    return draft.rated("warning")
