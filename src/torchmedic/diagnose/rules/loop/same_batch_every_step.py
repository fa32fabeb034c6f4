"""Every step trains on the same batch: the first batch of a new pass over the data.

What: `next(iter(loader))` starts a new pass and takes its first batch. Without shuffling it is always the same batch,
and the rest of the data is never used.

Why: `iter(loader)` is inside the loop.

Cure: use `for batch in loader:`, or one iterator that is made before the loop.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import SameBatchEveryStep
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM615", "same-batch-every-step", SameBatchEveryStep)
def check(evidence: LoopEvidence, incident: SameBatchEveryStep) -> Draft | None:
    draft = check.draft(evidence, "proven")
    draft.message = f"every step trains on the same batch, the first of {incident.batches}"
    draft.cause = "each step begins a new pass over the data, takes its first batch and drops the pass"
    draft.at(evidence.at("cause", incident.cause, "a new pass, and its first batch", "next"))
    draft.because(f"the last {incident.times} batches were made of the same items of the dataset, in the same order")
    draft.help("go through the loader with `for batch in loader`, or make the iterator once, before the loop")
    return draft.rated("warning")
