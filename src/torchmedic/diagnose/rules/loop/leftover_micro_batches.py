"""The last batches of an epoch are too few for an accumulation cycle, and get no update of their own.

What: the loop updates the weights after every N batches, and the number of batches of an epoch is not a multiple of N.
The gradients of the remaining batches are mixed into the first update of the next epoch, or are lost; at the end of the
training they are always lost.

Why: the condition for an update uses only the number of the batch.

Cure: update after the last batch too: `if (i + 1) % N == 0 or i + 1 == len(loader)`; or drop the remaining batches.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import LeftoverMicroBatches
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM621", "leftover-micro-batches", LeftoverMicroBatches)
def check(evidence: LoopEvidence, incident: LeftoverMicroBatches) -> Draft | None:
    left = incident.left
    last = f"last {left}" if left > 1 else "last one"
    fate = "thrown away" if incident.is_lost else "mixed into the first update of the next epoch"
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"the {last} of {incident.length} batches of an epoch make no update of their own"
        if left > 1
        else f"the {last} of {incident.length} batches of an epoch makes no update of its own"
    )
    draft.cause = f"{incident.length} is no multiple of {incident.size}; the gradients of the {last} are {fate}"
    draft.at(evidence.at("cause", incident.cause, f"comes after every {incident.size} batches", "step"))
    draft.help("update after the last batch of an epoch too", safety="changes-training")
    return draft.rated("note")
