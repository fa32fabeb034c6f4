"""Each pass over the data begins with the same random numbers: the generator is set back before it.

What: the DataLoader shuffles, and three passes in a row that trained the same model began with the same random number.

Why: `torch.manual_seed(...)` with the same number in each epoch sets the generator back. So do functions that call it,
such as `set_seed()`, also where they are called for an evaluation. The items then come in the same order in each pass,
and dropout, noise and augmentation repeat, too. No error is raised.

Cure: set the seed once, before training. For an evaluation, use `torch.random.fork_rng()`, which restores the generator
after it, or a `torch.Generator` of its own.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import RandomNumbersRepeat
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM662", "random-numbers-repeat", RandomNumbersRepeat)
def check(evidence: LoopEvidence, incident: RandomNumbersRepeat) -> Draft | None:
    draft = check.draft(evidence, "proven")
    draft.message = "each pass over the data draws the same random numbers again"
    draft.cause = "the generator has the same state at the beginning of each pass: order, dropout and noise repeat"
    loading = incident.loading
    if incident.cause == loading:
        draft.at(evidence.at("cause", loading, "each pass begins in the same state"))
    else:
        draft.at(evidence.at("cause", incident.cause, "sets the generator back"))
        draft.at(evidence.at("surfaced", loading, "each pass begins in the same state"))
    draft.because(f"{incident.passes} passes in a row began with the same random number of 63 bits")
    draft.help("set the seed once, before the loop over the epochs", safety="changes-training")
    return draft.rated("warning")
