"""Gradients are exchanged in every micro-batch, although they are accumulated.

What: an update of the weights is made from several backwards, and DistributedDataParallel exchanges the gradients of
all ranks in each of them. Only the last exchange is needed: the result is the same without the others.

Why: `backward` of a DistributedDataParallel module exchanges gradients unless it runs under `model.no_sync()`.

Cure: run forward and backward of all micro-batches but the last under `with model.no_sync():`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import size
from torchmedic.records.rank_facts import JobFacts


@rule("TM715", "exchange-in-every-micro-batch")
def check(job: JobFacts) -> Draft | None:
    first = job.ranks[0]
    if first.syncs < 2 or any(each.syncs != first.syncs for each in job.ranks):
        return None
    draft = check.draft(job, "proven")
    draft.message = f"the gradients are exchanged {first.syncs} times for one update"
    draft.cause = (
        f"each of {first.syncs} backwards exchanges {size(first.nbytes)} per rank, and only the last one has to"
    )
    if first.updating is not None:
        draft.at(line_location("cause", first.updating.file, first.updating.line, "one update, several exchanges"))
    draft.because(f"{size((first.syncs - 1) * first.nbytes)} per rank and update could be saved")
    draft.help("run all micro-batches but the last under `with model.no_sync():`")
    return draft.rated("note")
