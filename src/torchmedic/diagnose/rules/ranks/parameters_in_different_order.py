"""The ranks have built the same layers in different orders.

What: DistributedDataParallel pairs the parameters of the ranks by their order, not by their names. Here the same place
has another parameter on another rank. If both have the same shape, nothing is raised: each rank begins with the weights
of other layers, and the gradients of different layers are averaged.

Why: layers that are built in the order of a `set` of strings, which each process draws anew; of a directory listing; of
work that several threads finish; or of a shuffled list with a seed per rank.

Cure: build the layers in an order that all ranks share, for example from `sorted(names)`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.rank_facts import JobFacts


@rule("TM718", "parameters-in-different-order")
def check(job: JobFacts) -> Draft | None:
    first = job.ranks[0]
    other = next((each for each in job.ranks if each.parameters != first.parameters), None)
    if other is None or any(sorted(each.parameters) != sorted(first.parameters) for each in job.ranks):
        return None  # equal, or different models
    place, names = next(
        (at, pair)
        for at, pair in enumerate(zip(first.parameters, other.parameters, strict=True), 1)
        if pair[0] != pair[1]
    )
    draft = check.draft(job, "proven")
    draft.message = f"parameter {place} is `{names[0]}` on rank {first.rank} and `{names[1]}` on rank {other.rank}"
    draft.cause = "the layers were built in different orders, and the gradients of different layers are averaged"
    if first.wrapped_at is not None:
        label = "parameters are paired by their order here"
        draft.at(line_location("cause", first.wrapped_at.file, first.wrapped_at.line, label))
    draft.because("both ranks have the same names, so this is one model")
    draft.help("build the layers in an order that all ranks share: `sorted(names)` in place of a `set`")
    return draft.rated("warning")
