"""The training data is sorted by class: a batch contains only one class.

What: the dataset is sorted by its labels and is read in order. For many steps in a row the model sees one class and
forgets the others, and batch normalisation learns the statistics of one class at a time.

Why: `shuffle=True` is missing on the DataLoader of the training set.

Cure: use `DataLoader(dataset, shuffle=True)`, or a sampler that mixes the classes.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ClassesInOrder
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.source.live_frames import node_location


@loop_rule("TM616", "classes-in-order", ClassesInOrder)
def check(evidence: LoopEvidence, incident: ClassesInOrder) -> Draft | None:
    draft = check.draft(evidence, "proven")
    draft.message = f"the training data is sorted by class: {incident.classes} classes, sorted, and not shuffled"
    draft.cause = (
        f"the first {incident.first} of {incident.length} items are all of one class, and batches of "
        f"{incident.batch} are taken in the order of the dataset"
    )
    built = evidence.calls_in(incident.cause.file, "DataLoader")
    if len(built) == 1:
        draft.at(node_location("cause", incident.cause.file, built[0], "reads the items in their order"))
        draft.at(evidence.at("surfaced", incident.cause, "and this is trained on"))
    else:
        draft.at(evidence.at("cause", incident.cause, "what is trained on comes in the order of the dataset"))
    draft.because("the labels of the whole dataset never decrease")
    draft.help("shuffle the training data: `DataLoader(..., shuffle=True)`", safety="changes-training")
    return draft.rated("warning")
