"""Inputs and labels are shuffled apart, so each input has the label of another item.

What: each step takes a batch of inputs from one DataLoader and a batch of labels from another. Both data sets have the
same number of items, and the two batches of a step are never made of the same items. Or the script puts inputs and
labels into two different random orders before it pairs them. Or a loss over a table of all pairs, as of pictures and
texts, has labels that do not name the pair of each row: one column for all rows, or the row itself.

Why: each DataLoader with `shuffle=True` draws an order of its own, and so does each call of `shuffle`, `randperm` or
`permutation`.

Cure: put inputs and labels into one dataset, such as `TensorDataset(inputs, labels)`, and use one DataLoader. Draw one
order, and use it for both: `x[order]`, `y[order]`. In a table of all pairs, the label of row i is the column of its
partner: `torch.arange(n)` where both sides come in the same order.
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
    if incident.pairs:
        return _wrong_pairs(evidence, incident, draft)
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


def _wrong_pairs(evidence: LoopEvidence, incident: LabelsOfOtherItems, draft: Draft) -> Draft:
    rows = incident.pairs
    draft.at(evidence.at("cause", incident.cause, "labels that do not name the pairs"))
    draft.at(evidence.at("surfaced", incident.other, "the loss compares with them", "backward"))
    if incident.is_itself:
        draft.message = "each example is its own partner: the labels of a table of pairs name the row itself"
        draft.cause = "both sides of the table are the same tensor, so its diagonal compares each example with itself"
        draft.help("hide the diagonal, and let the label of each row be the column of its other view")
    else:
        draft.message = "the labels do not belong to the pairs: all rows of a table of pairs have the same label"
        draft.cause = f"the loss compares all {rows} rows with one column, and the pair of each row is another one"
        draft.help("let the label of row i be the column of its partner: `torch.arange(n)`, in the same order")
    draft.because(f"the labels and the {rows} x {rows} table of {incident.batches} losses show it")
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
