"""The gradients are cleared inside the accumulation cycle: only the last micro-batch counts.

What: the loop calls `backward()` for several micro-batches and updates the weights after the last of them, but clears
the gradients before each one. The gradients of the earlier micro-batches are lost.

Why: `zero_grad()` is at the top of the loop, which is correct only if every batch is followed by an update.

Cure: clear the gradients once per update, right after `optimizer.step()`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import GradientsClearedInsideAccumulation
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM602", "gradients-cleared-inside-accumulation", GradientsClearedInsideAccumulation)
def check(evidence: LoopEvidence, incident: GradientsClearedInsideAccumulation) -> Draft | None:
    lost, kept = incident.lost, incident.kept
    total = lost + kept
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"{lost} of {total} micro-batches are thrown away: the gradients are cleared inside of the accumulation cycle"
    )
    draft.cause = (
        f"each update follows {total} calls of backward, and the gradients of {lost} of them were cleared before it"
    )
    draft.at(evidence.at("cause", incident.cause, "clears the gradients of the earlier micro-batches", "zero_grad"))
    draft.at(evidence.at("surfaced", incident.backward, f"called {total} times per update", "backward"))
    draft.at(evidence.at("surfaced", incident.update, "uses what is left", "step"))
    ratio = evidence.habits.lost_ratio(incident.optimizer)
    if ratio is not None:
        used, whole = ratio
        draft.because(f"norm of the gradients that were used: {used:.3g}; of all {total} micro-batches: {whole:.3g}")
    draft.because(f"seen in all of {incident.cycles} updates")
    name = evidence.optimizer_name(incident.update) or "optimizer"
    return draft.help(
        f"move it behind `{name}.step()`, so that it is called once per update", safety="changes-training"
    )
