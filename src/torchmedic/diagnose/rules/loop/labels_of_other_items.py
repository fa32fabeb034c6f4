"""Inputs and labels are shuffled apart, so each input has the label of another item.

What: each step takes a batch of inputs from one DataLoader and a batch of labels from another. Both data sets have the
same number of items, and the two batches of a step are never made of the same items. Or the script puts inputs and
labels into two different random orders before it pairs them.

Why: each DataLoader with `shuffle=True` draws an order of its own, and so does each call of `shuffle`, `randperm` or
`permutation`.

Cure: put inputs and labels into one dataset, such as `TensorDataset(inputs, labels)`, and use one DataLoader. Draw one
order, and use it for both: `x[order]`, `y[order]`.
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
    if incident.names is not None:
        return _shuffled_apart(evidence, incident, incident.names, draft)
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


def _shuffled_apart(
    evidence: LoopEvidence, incident: LabelsOfOtherItems, names: tuple[str, str], draft: Draft
) -> Draft:
    first, second = names
    draft.message = f"inputs and labels do not belong together: `{first}` and `{second}` are shuffled apart"
    draft.cause = "two statements put them into two different random orders, and a later one pairs them"
    draft.at(
        evidence.at("cause", incident.cause, f"an order of its own for `{second}`"),
        evidence.at("origin", incident.other, f"another order for `{first}`"),
    )
    draft.because("both have as many rows, and one of them has a single value per row")
    draft.help(f"draw one order, and use it for both: `{first}[order]`, `{second}[order]`")
    return draft.rated("warning")


def _is_shuffled(call: ast.Call) -> bool:
    return any(word.arg in ("shuffle", "sampler", "batch_sampler") for word in call.keywords) or len(call.args) > 2
