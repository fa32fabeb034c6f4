"""The schedule advances with every batch, but its numbers are in epochs.

What: `scheduler.step()` is called after every update. A period that is given in epochs ends within the first epoch: the
learning rate is close to zero for the rest of the training, or goes up and down many times in one epoch.

Why: `scheduler.step()` is inside the loop over batches. Or `scheduler.step(loss)` gives a loss for the number of the
epoch: only `ReduceLROnPlateau` takes a number to compare.

Cure: call it once per epoch, after the loop over the batches; or give the period in batches.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import SchedulePerBatch
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM612", "schedule-per-batch", SchedulePerBatch)
def check(evidence: LoopEvidence, incident: SchedulePerBatch) -> Draft | None:
    draft = check.draft(evidence, "likely")
    if incident.is_of_number:
        draft.message = f"{incident.schedule} is given a loss or a metric, and takes it for the number of the epoch"
        draft.cause = f"{incident.why}, so the schedule does not advance"
        draft.at(evidence.at("cause", incident.cause, "the argument is the number of an epoch", "step"))
        draft.help("call `step()` without an argument, or use `ReduceLROnPlateau`", safety="changes-training")
        return draft.rated("warning")
    draft.message = f"{incident.schedule} advances with every batch, although its numbers are in epochs"
    draft.cause = incident.why
    draft.at(evidence.at("cause", incident.cause, "called after every update", "step"))
    draft.help("call it once per epoch, or give it its period in batches", safety="changes-training")
    return draft.rated("warning")
