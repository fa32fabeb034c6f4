"""Inputs and labels come from two loaders that are shuffled apart, so each input has the label of another item.

What: each step takes a batch of inputs from one DataLoader and a batch of labels from another. Both data sets have the
same number of items, and the two batches of a step are never made of the same items.

Why: each DataLoader with `shuffle=True` draws an order of its own.

Cure: put inputs and labels into one dataset, such as `TensorDataset(inputs, labels)`, and use one DataLoader.
"""

from __future__ import annotations

import ast

from torchmedic.detect.loop.incident import LabelsOfOtherItems
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.source.live_frames import node_location


@loop_rule("TM651", "labels-of-other-items", LabelsOfOtherItems)
def check(evidence: LoopEvidence, incident: LabelsOfOtherItems) -> Draft | None:
    draft = check.draft(evidence, "likely")
    draft.message = "inputs and labels do not belong together: two loaders are shuffled apart"
    draft.cause = "one DataLoader gives the inputs, another one the labels, and each draws an order of its own"
    loaders = [call for call in evidence.calls_in(incident.cause.file, "DataLoader") if _is_shuffled(call)]
    if len(loaders) == 2:
        draft.at(*(node_location("cause", incident.cause.file, call, "its own order") for call in loaders))
        draft.at(evidence.at("surfaced", incident.cause, "brings them together"))
    else:
        draft.at(evidence.at("cause", incident.cause, "brings batches of two orders together"))
    draft.because(
        f"in {incident.batches} steps the two batches were not once made of the same items",
        f"both loaders have {incident.length} batches",
    )
    draft.help("put inputs and labels into one dataset, such as `TensorDataset(inputs, labels)`, with one DataLoader")
    return draft.rated("warning")


def _is_shuffled(call: ast.Call) -> bool:
    return any(word.arg in ("shuffle", "sampler", "batch_sampler") for word in call.keywords) or len(call.args) > 2
