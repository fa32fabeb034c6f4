"""The loop over the data gets no batches: an iterator is used up by the first pass, or a loader gives none at all.

What: an iterator such as `zip(...)`, a generator or `iter(loader)` is made before the loop over the epochs, and the
loop inside of it takes all that the iterator gives. Or a DataLoader has no batch, and the run has made no update.

Why: an iterator can be gone through once; from the second epoch on its loop does nothing. With `drop_last=True` a
DataLoader drops a batch that is not full, also if it is the only one. A dataset that found no files has no items.

Cure: make the iterator inside of the loop over the epochs, or put its items into a list. Use smaller batches, or leave
`drop_last` out. Check the path from which the dataset reads.
"""

from __future__ import annotations

import ast

from torchmedic.detect.loop.incident import LoopWithoutBatches
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.source.live_frames import node_location


@loop_rule("TM654", "loop-without-batches", LoopWithoutBatches)
def check(evidence: LoopEvidence, incident: LoopWithoutBatches) -> Draft | None:
    return _used_up(evidence, incident) if incident.name else _empty(evidence, incident)


def _used_up(evidence: LoopEvidence, incident: LoopWithoutBatches) -> Draft:
    draft = check.draft(evidence, "proven")
    name, rest = incident.name, count(incident.turns - 1, "other turn")
    draft.message = f"only one of {incident.turns} epochs trains: the first one uses `{name}` up"
    draft.cause = f"`{name}` can be gone through once, and is made before the loop over the epochs"
    draft.at(evidence.at("cause", incident.cause, f"made once: a {incident.kind}"))
    if incident.loop != incident.cause:
        draft.at(evidence.at("surfaced", incident.loop, f"does nothing in {rest} of the loop around it"))
    draft.because("no line inside of the outer loop makes it anew, and none leaves the inner loop before its end")
    draft.help(f"make `{name}` inside of the loop over the epochs, or make it a list")
    return draft.rated("warning")


def _empty(evidence: LoopEvidence, incident: LoopWithoutBatches) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = "nothing was trained: the DataLoader gives no batch"
    if incident.items:
        draft.cause = (
            f"the dataset has {count(incident.items, 'item')}, a batch has {incident.size}, and drop_last=True drops "
            "a batch that is not full"
        )
        draft.help(f"use a batch size of at most {incident.items}, or leave `drop_last=True` out")
    else:
        draft.cause = "the dataset has no items"
        draft.help("print the length of the dataset, and check the path or the condition that selects its items")
    loaders = [call for call in evidence.calls_in(incident.cause.file, "DataLoader") if _drops(call)]
    if len(loaders) == 1 and incident.items:
        draft.at(node_location("cause", incident.cause.file, loaders[0], "no batch is full"))
        draft.at(evidence.at("surfaced", incident.cause, "does nothing"))
    else:
        draft.at(evidence.at("cause", incident.cause, "gets no batch"))
    draft.because("the run ended without a backward pass and without an update")
    return draft.rated("warning")


def _drops(call: ast.Call) -> bool:
    return any(word.arg == "drop_last" for word in call.keywords)
