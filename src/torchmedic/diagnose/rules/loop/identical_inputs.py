"""All items of the data have the same input, and their labels differ.

What: in every batch that was looked at, each row of the input is equal to each other row, also to those of the other
batches. The labels are not all equal.

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
    draft.cause = f"all {incident.rows} rows of the inputs in {incident.batches} batches are equal"
    if incident.name:
        draft.cause += f"; `self.{incident.name}` of the dataset holds one value for all items"
    draft.at(evidence.at("cause", incident.cause, "the same for every item"))
    if incident.data != incident.cause:
        draft.at(evidence.at("surfaced", incident.data, "the batches come from here"))
    draft.because("the labels of these rows are not all equal, and the loss compares with them")
    draft.help("print two items of the dataset, and find the step of the preparation that makes their inputs equal")
    return draft.rated("warning")
