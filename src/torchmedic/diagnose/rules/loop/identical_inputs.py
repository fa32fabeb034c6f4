"""All items of the data have the same input, and their labels differ.

What: in every batch that was looked at, each row of the input is equal to each other row, also to those of the other
batches. The labels are not all equal, or the dataset has a table with a different entry for each item and takes one of
them for every index. Or a whole pass over the data shows one label only.

Why: the preparation of the data lost everything: an integer division such as `pixels // 255`, a vocabulary in which no
word is found, so that all words are unknown, a file that could not be read and was replaced by zeros, one array that is
stored many times and was changed in place. The model can only learn how
frequent each label is, and the loss stands still at that level.

Cure: print two items of the dataset, and follow their inputs to the step of the preparation that makes them equal.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import IdenticalInputs
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM650", "identical-inputs", IdenticalInputs)
def check(evidence: LoopEvidence, incident: IdenticalInputs) -> Draft | None:
    draft = check.draft(evidence, "likely")
    draft.message = "the model can learn nothing from its inputs: all items have the same input, and different labels"
    if incident.label is not None:
        return _one_label(evidence, incident, draft)
    if incident.is_one_item:
        return _one_item(evidence, incident, draft)
    if incident.is_overwritten:
        return _overwritten(evidence, incident, draft)
    draft.cause = f"all {incident.rows} rows of the inputs in {incident.batches} batches are equal"
    if incident.name:
        draft.cause += f"; `self.{incident.name}` of the dataset holds one value for all items"
    draft.at(evidence.at("cause", incident.cause, "the same for every item"))
    if incident.data != incident.cause:
        draft.at(evidence.at("surfaced", incident.data, "the batches come from here"))
    draft.because("the labels of these rows are not all equal, and the loss compares with them")
    draft.help("print two items of the dataset, and find the step of the preparation that makes their inputs equal")
    return draft.rated("warning")


def _one_label(evidence: LoopEvidence, incident: IdenticalInputs, draft: Draft) -> Draft:
    draft.message = f"all items have the same label: {incident.label}"
    draft.cause = "a model that always answers with this label is always right, whatever the inputs are"
    draft.at(evidence.at("cause", incident.cause, "the same label for every item"))
    if incident.data != incident.cause:
        draft.at(evidence.at("surfaced", incident.data, "the batches come from here"))
    draft.because(f"all {incident.rows} labels in {incident.batches} batches, a whole pass among them, are equal")
    draft.help("print the labels of some items, and find the step of the preparation that makes them equal")
    return draft.rated("warning")


def _one_item(evidence: LoopEvidence, incident: IdenticalInputs, draft: Draft) -> Draft:
    draft.message = "the model sees one item only: the dataset gives the same one for every index"
    draft.cause = f"`self.{incident.name}` has a different entry for each item, and the same one is taken for all"
    draft.at(evidence.at("cause", incident.cause, "the same entry for every index"))
    draft.at(evidence.at("surfaced", incident.data, "the batches come from here"))
    draft.because(f"all {incident.rows} rows of inputs and of labels in {incident.batches} batches are equal")
    draft.help(f"take the entry of the index that `__getitem__` is given: `self.{incident.name}[index]`")
    return draft.rated("warning")


def _overwritten(evidence: LoopEvidence, incident: IdenticalInputs, draft: Draft) -> Draft:
    tensor = f"`self.{incident.name}`" if incident.name else "one tensor"
    draft.message = "all inputs of a batch are those of its last item, and the labels differ"
    draft.cause = f"the dataset gives {tensor} for each item, and writes the next item into it"
    draft.at(evidence.at("cause", incident.cause, "the same tensor for every item"))
    draft.at(evidence.at("surfaced", incident.data, "the batches come from here"))
    draft.because(f"the rows of the inputs are equal in each of {incident.batches} batches that were drawn at random")
    draft.help(f"give a copy of {tensor}, such as `.clone()`, so that each item has a tensor of its own")
    return draft.rated("warning")
