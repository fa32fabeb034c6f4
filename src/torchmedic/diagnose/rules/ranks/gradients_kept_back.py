"""The gradients of a sharded model are never exchanged, so its optimizer has none to apply.

What: under `fully_shard`, a rank updates its own parts of the weights. They get their gradients when the ranks exchange
the gradients of the whole weights. `set_requires_gradient_sync(False)` leaves the exchange out, and it was off in each
`backward()` so far: the gradients add up inside of the module, and every update does nothing. No error is raised.

Why: the exchange is to be left out for all micro-batches of an accumulation but the last, and the condition for the
last one never holds. Or it was switched off once, and not on again.

Cure: call `set_requires_gradient_sync(True)` before the last `backward()` of each update.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import GradientsKeptBack
from torchmedic.detect.loop.shards import SYNC_SWITCH
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM728", "gradients-kept-back", GradientsKeptBack)
def check(evidence: LoopEvidence, incident: GradientsKeptBack) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = "the weights do not change: the gradients of the sharded model are never exchanged"
    draft.cause = "the parts of the weights that an optimizer updates get their gradients in the exchange, which is off"
    draft.at(
        evidence.at("cause", incident.cause, "the exchange stays off", SYNC_SWITCH),
        evidence.at("surfaced", incident.update, "finds no gradient", "step"),
    )
    draft.because(
        f"the loss reaches {count(incident.reached, 'whole parameter')}, and the optimizer has parts of them",
        f"{count(incident.updates, 'update')} had no gradient to apply",
    )
    return draft.help(
        f"call `{SYNC_SWITCH}(True)` before the last `backward()` of each update", safety="changes-training"
    )
