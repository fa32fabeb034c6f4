"""The schedule advances before the first update, so its first learning rate is never used.

What: `scheduler.step()` comes before `optimizer.step()`. The first update already uses the second rate, and every later
change comes one step, or one epoch, too early.

Why: until 2019 (PyTorch 1.1) this was the recommended order.

Cure: call `optimizer.step()` first, then `scheduler.step()`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ScheduleBeforeUpdate
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.replay.trace.values import number


@loop_rule("TM611", "schedule-before-update", ScheduleBeforeUpdate)
def check(evidence: LoopEvidence, incident: ScheduleBeforeUpdate) -> Draft | None:
    draft = check.draft(evidence, "proven")
    draft.message = (
        "the first learning rate of the schedule is never used: the schedule advances before the first update"
    )
    draft.cause = (
        f"the schedule begins with {number(incident.first)}, but the first update used {number(incident.used)}"
    )
    draft.at(evidence.at("cause", incident.cause, "moves on, although this rate has not been used yet", "step"))
    draft.at(evidence.at("surfaced", incident.update, "the update comes afterwards", "step"))
    draft.because("the same in every iteration: first the schedule, then the update")
    draft.help("call it after the update", safety="changes-training")
    return draft.rated("warning")
