"""A model has one layer where several were meant: a list with one layer was multiplied.

What: a container of the trained model holds the same layer several times, and a line of the script multiplies a list in
which this layer is built.

Why: `[Block()] * 6` calls `Block()` once, and makes a list of six references to the result. All six places have the
same weights, so the model has a sixth of the parameters that were meant, and each gets the sum of six gradients. No
error is raised.

Cure: build each layer: `[Block() for _ in range(6)]`. To share one layer on purpose, give it a name and call it in a
loop.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import OneLayerForSeveral
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM663", "one-layer-for-several", OneLayerForSeveral)
def check(evidence: LoopEvidence, incident: OneLayerForSeveral) -> Draft | None:
    where = f"`{incident.name}`" if incident.name else "the model"
    draft = check.draft(evidence, "likely")
    draft.message = f"{where} has one `{incident.kind}` {incident.times} times, with the same weights"
    draft.cause = "a list with one layer was multiplied, which copies the reference and not the layer"
    draft.at(evidence.at("cause", incident.cause, f"{incident.times} references to one layer"))
    draft.because(f"its {incident.elements:,} weights are all that {incident.times} places have")
    draft.help(
        f"build each layer: `[{incident.kind}(...) for _ in range({incident.times})]`", safety="changes-training"
    )
    return draft.rated("warning")
