"""The gradient falls from layer to layer, until it is too small to change the first layers.

What: the first layers have a gradient, and their sampled weights are bit for bit what they were many updates ago. From
the last layer to the first the gradient falls by a factor with nearly every layer.

Why: on its way back, a gradient is multiplied by the derivative of every activation and by the weights of every layer.
The derivative of a sigmoid is 1/4 at most; with many such layers, or with small initial weights, the product is next to
0. The last layers learn to guess from what the first ones happen to pass on, and the loss stands still.

Cure: use `relu` or `gelu` with a matching initialisation, normalisation layers, or residual connections.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import VanishingGradients
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM628", "vanishing-gradients", VanishingGradients)
def check(evidence: LoopEvidence, incident: VanishingGradients) -> Draft | None:
    first, last = incident.gradients[0], incident.gradients[-1]
    draft = check.draft(evidence, "proven")
    draft.message = f"the gradients vanish: the first {incident.still} layers do not learn"
    draft.cause = f"from the last layer to the first the largest gradient falls from {last:.1e} to {first:.1e}"
    name = f"`{incident.names[0]}` " if incident.names else ""
    draft.at(evidence.at("cause", incident.cause, f"{name}does not change"))
    draft.at(evidence.at("surfaced", incident.update, "changes the last layers only", "step"))
    turns = len(incident.gradients) - 1
    draft.because(
        f"the sampled weights of the first {incident.still} layers are bit for bit what they were "
        f"{count(incident.updates, 'update')} ago",
        f"the gradient falls by a factor of {(last / first) ** (1 / turns):.1f} per layer" if first > 0 else "",
    )
    draft.help(
        "use `relu` or `gelu`, normalisation layers or residual connections between the layers",
        safety="changes-training",
    )
    return draft.rated("warning")
