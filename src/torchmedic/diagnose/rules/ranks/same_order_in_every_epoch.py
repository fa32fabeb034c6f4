"""A `DistributedSampler` gives the items in the same order in every epoch.

What: the sampler shuffles by its seed and its epoch. The epoch was the same in two passes over the data that the model
was trained on, so both had the same order, with the same batches and the same division between ranks.

Why: `sampler.set_epoch(epoch)` was not called, or was called on another sampler, or with the same number.

Cure: call `sampler.set_epoch(epoch)` at the beginning of every epoch, before the loader is iterated.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.rank_facts import JobFacts


@rule("TM713", "same-order-in-every-epoch")
def check(job: JobFacts) -> Draft | None:
    repeated = [each for each in job.ranks if each.same_order]
    if not repeated or len(repeated) < len(job.ranks):
        return None
    first = repeated[0]
    draft = check.draft(job, "proven")
    draft.message = "two epochs have had the same order of items, though the sampler shuffles"
    draft.cause = "the epoch of the `DistributedSampler` was the same in both, and its order depends on nothing else"
    if first.loading is not None:
        draft.at(line_location("cause", first.loading.file, first.loading.line, "the same order in every epoch"))
    draft.because("seen on every rank")
    draft.help("call `sampler.set_epoch(epoch)` before this loop, in every epoch")
    return draft.rated("warning")
