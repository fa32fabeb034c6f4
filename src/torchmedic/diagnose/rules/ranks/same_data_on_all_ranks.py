"""Several ranks train on the same batches.

What: batches that two or more ranks trained on are equal, one by one. The ranks compute the same gradients,
and their average is what one rank alone would have computed: the job costs more and learns nothing more.

Why: the loader has no `DistributedSampler`, and all ranks shuffle with the same seed or not at all; a sampler that was
made with fixed `num_replicas` and `rank`; what `accelerator.prepare` returns is not used; an iterable dataset that does
not divide its items between ranks; batches that are drawn by hand with the same seed on all ranks, or without a seed:
torch has the same one in every process then.

Cure: pass `sampler=DistributedSampler(dataset)` to the loader (and no `shuffle`), or let an iterable dataset yield
every n-th item, with the rank as offset. Without a loader: seed the generator that draws the batches with
`seed + rank`.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._loader_lines import loader_made_at, shared_out_at
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.rank_facts import JobFacts, RankFacts
from torchmedic.source.assignments import names_read, names_written
from torchmedic.source.syntax import nodes_in, syntax_tree

_MIN_BATCHES = 4  # that must be equal
_OF_STREAM = "_InfiniteConstantSampler"  # what a loader has for an IterableDataset, which takes no sampler
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
    draft.cause = f"{len(first.batches)} batches of {who} were compared and are equal, so their gradients are too"
    line, wrapped = first.loading, first.wrapped_at if _is_wrapper_unused(job) else None
    if wrapped is not None:
        draft.at(line_location("cause", wrapped.file, wrapped.line, "the wrapper is made here, and never called"))
        draft.because("the model inside of DistributedDataParallel was trained, and the wrapper was never called")
        draft.help("train with the wrapper, or with what the library returns for model and loader")
    if line is not None and wrapped is not None:
        draft.at(line_location("surfaced", line.file, line.line, "the batches are taken here"))
    elif line is not None:
        file, made = loader_made_at(first, line) if first.sampler else (line.file, _made_at(line.file, line.line))
        if first.stream is not None:
            at = shared_out_at(first.stream)
            draft.at(line_location("cause", first.stream.file, at, "all these ranks get the same items of this stream"))
        draft.at(
            line_location("surfaced" if draft.has_place else "cause", file, made, "the same batches on all these ranks")
        )
        if first.sampler and (file, made) != (line.file, line.line):
            draft.at(line_location("surfaced", line.file, line.line, "the batches are taken here"))
    is_stream = first.sampler == _OF_STREAM
    draft.because("drawn from an IterableDataset" if is_stream else f"drawn by `{first.sampler}`" * bool(first.sampler))
    draft.because(f"first batch: items {', '.join(map(str, first.items))} ..." if first.items else "")
    draft.because("the gradients are averaged by DistributedDataParallel" if wrapped is None else "")
    draft.help(
        "let the IterableDataset of each rank yield other items, for example every n-th one of n ranks from its rank on"
        if is_stream
        else "pass `sampler=DistributedSampler(dataset)` to the loader, and call its `set_epoch` in every epoch"
        if first.sampler
        else "draw other batches on each rank: seed the generator with `seed + rank`, or take every n-th item"
    )
    return draft.rated("warning")


def _made_at(file: str, line: int) -> int:
    """The nearest line that assigns an input of the model, at or above a call of the model; else the line itself."""
    nodes = list(nodes_in(syntax_tree(file)))
    around = [each for each in nodes if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or 0)]
    if not around:
        return line
    called = {
        each.func.id for each in ast.walk(around[-1]) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
    }
    inputs = names_read(around[-1]) - called
    made = [
        each.lineno
        for each in nodes
        if isinstance(each, ast.Assign) and inputs & set(names_written(each)) and each.lineno < line
    ]
    return max(made, default=line)


def _is_wrapper_unused(job: JobFacts) -> bool:
    """Whether no rank has called its wrapper for training, and no rank did so under `no_sync`."""
    return job.ended and not any(each.forwards or each.unsynced or each.is_apart for each in job.ranks)


def _alike(job: JobFacts) -> list[RankFacts]:
    """The ranks whose first batches are equal, where equal batches are no use: gradients are averaged over all ranks.

    Batches that are equal among themselves, such as constants, say nothing.
    """
    if any(each.wrapper not in _DATA_PARALLEL for each in job.ranks):
        return []
    if not all(each.forwards for each in job.ranks) and not _is_wrapper_unused(job):
        return []
    groups: dict[tuple[str, ...], list[RankFacts]] = {}
    for each in job.ranks:
        told = each.batches[:_MIN_BATCHES]
        if len(told) == _MIN_BATCHES and len(set(told)) == _MIN_BATCHES and all(told):
            groups.setdefault(told, []).append(each)
    return max(groups.values(), key=len, default=[])
