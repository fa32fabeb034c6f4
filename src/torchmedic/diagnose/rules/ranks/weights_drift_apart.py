"""The ranks train copies of one model, and their weights are not the same any more.

What: after the same number of updates, a weight has different values on different ranks, although the ranks are to
train one model together. What rank 0 saves is one of several models, each trained on a part of the data.

Why: the gradients are not averaged: the `module` inside of DistributedDataParallel is called and not the wrapper, or a
loop that averages by hand leaves out a step. Or the ranks began with different weights, which averaging keeps apart: a
model that was built without a common seed and not broadcast. Or one rank changed its weights by itself.

Cure: call the wrapper, not its `module`. Without DistributedDataParallel, broadcast the weights of rank 0 before the
first step, and `all_reduce` every gradient before every update.
"""

from __future__ import annotations

import re

from torchmedic.detect.ranks.drift import Drift, find_drift
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.ranks import JobFacts
from torchmedic.source.branches import calls_by_rank

_WRITES = re.compile(r"[a-z]\w*[a-z]_")  # a method that writes in place: `copy_`
_CAUSES = {
    "unused-wrapper": "DistributedDataParallel was made, but never called for training, so it averages nothing",
    "start": "the weights differed before the first update, and averaged gradients do not bring them together",
    "changed": "they were equal at first, and DistributedDataParallel gives all ranks the same gradients",
    "left-out": "its gradient is not exchanged between the ranks, and the gradients of other weights are",
    "no-exchange": "they were equal at first, and no gradient was exchanged between the ranks",
}
_CURES = {
    "unused-wrapper": "call the DistributedDataParallel module in the training loop, and not its `module`",
    "start": "broadcast the weights of rank 0 before the first step, or build the model with one seed on all ranks",
    "changed": "let all ranks change the weights alike, outside of `optimizer.step()` too",
    "left-out": "`all_reduce` the gradient of every weight, or wrap the model in DistributedDataParallel",
    "no-exchange": "wrap the model in DistributedDataParallel, or `all_reduce` every gradient before the update",
}


@rule("TM714", "weights-drift-apart")
def check(job: JobFacts) -> Draft | None:
    drift = find_drift(job)
    if drift is None:
        return None
    name = f"`{drift.name}`" if drift.name else f"a weight of shape {list(drift.shape)}"
    changing = _changing(drift)
    draft = check.draft(job, "likely" if drift.why in ("no-exchange", "left-out") or changing else "proven")
    draft.message = f"{name} has different values on different ranks after {drift.updates} updates"
    draft.cause = _CAUSES[drift.why]
    line = drift.line
    if line is not None and changing is not None:
        draft.at(line_location("cause", line.file, changing, "only some ranks change weights here"))
    if line is not None:
        draft.at(line_location("cause" if changing is None else "surfaced", line.file, line.line, _label(drift)))
    for rank, size in drift.sizes[:8]:
        draft.because(f"{ranks([rank])}: sum of absolute values {size:.6g}")
    draft.help(_CURES[drift.why])
    return draft.rated("warning")


def _changing(drift: Drift) -> int | None:
    """The only line of the file that loads or writes tensors on some ranks, where no exchange was left out."""
    if drift.why != "changed" or drift.line is None:
        return None
    lines = calls_by_rank(
        drift.line.file, lambda name: name == "load_state_dict" or _WRITES.fullmatch(name) is not None
    )
    return lines[0] if len(lines) == 1 else None


def _label(drift: Drift) -> str:
    if drift.why == "unused-wrapper":
        return "the wrapper is made here, and never called for training"
    return "each rank updates its own weights here"
