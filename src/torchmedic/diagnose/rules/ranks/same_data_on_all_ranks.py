"""Several ranks train on the same batches.

What: the first batches that two or more ranks trained on are equal, one by one. The ranks compute the same gradients,
and their average is what one rank alone would have computed: the job costs more and learns nothing more.

Why: the loader has no `DistributedSampler`, and all ranks shuffle with the same seed or not at all; a sampler that was
made with fixed `num_replicas` and `rank`; an iterable dataset that does not divide its items between ranks.

Cure: pass `sampler=DistributedSampler(dataset)` to the loader (and no `shuffle`), or let an iterable dataset yield
every n-th item, with the rank as offset.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.ranks import JobFacts, RankFacts

_MIN_BATCHES = 4  # that must be equal
_DATA_PARALLEL = ("DistributedDataParallel",)


@rule("TM712", "same-data-on-all-ranks")
def check(job: JobFacts) -> Draft | None:
    alike = _alike(job)
    if len(alike) < 2:
        return None
    first = alike[0]
    who = ranks([each.rank for each in alike])
    everyone = who if len(alike) < len(job.ranks) else "both ranks" if len(alike) == 2 else f"all {len(alike)} ranks"
    draft = check.draft(job, "proven")
    draft.message = f"{everyone} train on the same batches"
    draft.cause = f"the first {len(first.batches)} batches of {who} are equal, so their gradients are too"
    if first.loading is not None:
        draft.at(line_location("cause", first.loading.file, first.loading.line, "the same batches on all these ranks"))
    draft.because(f"drawn by `{first.sampler}`" if first.sampler else "")
    draft.because(f"first batch: items {', '.join(map(str, first.items))} ..." if first.items else "")
    draft.because("the gradients are averaged by DistributedDataParallel")
    draft.help("pass `sampler=DistributedSampler(dataset)` to the loader, and call its `set_epoch` in every epoch")
    return draft.rated("warning")


def _alike(job: JobFacts) -> list[RankFacts]:
    """The ranks whose first batches are equal, where equal batches are no use: gradients are averaged over all ranks.

    Batches that are equal among themselves, such as constants, say nothing.
    """
    if any(each.wrapper not in _DATA_PARALLEL or not each.forwards for each in job.ranks):
        return []
    groups: dict[tuple[str, ...], list[RankFacts]] = {}
    for each in job.ranks:
        told = each.batches[:_MIN_BATCHES]
        if len(told) == _MIN_BATCHES and len(set(told)) == _MIN_BATCHES and all(told):
            groups.setdefault(told, []).append(each)
    return max(groups.values(), key=len, default=[])
