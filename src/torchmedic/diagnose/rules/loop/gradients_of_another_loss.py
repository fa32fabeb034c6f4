"""An update also applies gradients of a loss that another optimizer minimises: they are not cleared in between.

What: the loss of the second model goes through the first one, and its backward gives both of them gradients. The second
model is updated. Those of the first model stay, the backward of its own loss adds to them, and its optimizer applies
the sum.

Why: the gradients are cleared right after the update, or for all models at the begin of a step. In a GAN, the
discriminator is then also trained to take generated samples for real ones; with an actor, the critic to give its
actions a high value.

Cure: clear the gradients right before the backward of the own loss.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import GradientsOfAnotherLoss
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM666", "gradients-of-another-loss", GradientsOfAnotherLoss)
def check(evidence: LoopEvidence, incident: GradientsOfAnotherLoss) -> Draft | None:
    draft = check.draft(evidence, "likely")
    draft.message = "an update also applies the gradients of a loss that another optimizer minimises"
    draft.cause = "that loss goes through these weights, and what its backward leaves there is not cleared"
    if incident.cleared is not None:
        draft.at(evidence.at("cause", incident.cleared, "clears the gradients too early", "zero_grad"))
        draft.at(evidence.at("surfaced", incident.own, "adds to what is there", "backward"))
    else:
        draft.at(evidence.at("cause", incident.own, "adds to what is there", "backward"))
    draft.at(evidence.at("surfaced", incident.other, "leaves gradients in these weights, too", "backward"))
    draft.at(evidence.at("surfaced", incident.update, "applies the sum", "step"))
    draft.because(f"seen in {count(incident.updates, 'update')}, all of this kind so far")
    return draft.help("clear the gradients right before the backward of the own loss", safety="changes-training").rated(
        "warning"
    )
