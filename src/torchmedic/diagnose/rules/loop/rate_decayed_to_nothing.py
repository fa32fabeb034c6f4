"""The learning rate fell to next to nothing early, and more than half of all updates change nothing.

What: the learning rate is 0, or less than a ten-thousandth of what it was, and has been for more than half of the run.

Why: a schedule that was meant to move once per epoch moves with every batch; its length was given in epochs or for a
shorter run; or a factor is applied far more often than it was meant to be. An update is the learning rate times the
gradient, so the weights stay as they are. The loss stands still, and no error is raised.

Cure: call `scheduler.step()` once per epoch, or give the schedule its length in updates:
`epochs * len(loader)`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import RateDecayed
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM625", "rate-decayed-to-nothing", RateDecayed)
def check(evidence: LoopEvidence, incident: RateDecayed) -> Draft | None:
    schedule = f"`{incident.schedule}`" if incident.schedule else "the loop"
    draft = check.draft(evidence, "proven" if incident.is_per_update or not incident.schedule else "likely")
    draft.message = (
        f"the learning rate is next to nothing since step {incident.since}: it fell from {incident.first:.1e} to "
        f"{incident.rate:.1e}"
    )
    draft.cause = (
        f"{schedule} has lowered it with every update"
        if incident.is_per_update
        else f"{schedule} has lowered it long before the run was over"
    )
    label = "called after every update" if incident.is_per_update else "sets the learning rate"
    draft.at(
        evidence.at("cause", incident.cause, label, "step"),
        evidence.at("origin", incident.built, "how the learning rate falls")
        if incident.built != incident.cause
        else None,
        evidence.at("surfaced", incident.update, "changes next to nothing", "step"),
    )
    draft.because(
        f"{count(incident.updates, 'update')} of {incident.since + incident.updates} were made with at most "
        f"{incident.rate / incident.first:.0e} of the largest learning rate",
    )
    draft.help(
        "move the schedule once per epoch, or give it its length in updates"
        if incident.schedule
        else "lower the learning rate more slowly, or not below a bound",
        safety="changes-training",
    )
    return draft.rated("warning")
