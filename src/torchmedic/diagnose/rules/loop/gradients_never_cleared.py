"""The gradients are never cleared: every update applies the sum of all gradients since training began.

What: `backward()` adds to `.grad`. Nothing clears the gradients between two updates, so each step uses the gradients of
all earlier batches again, which belong to old weights.

Why: the call of `zero_grad()` is missing, or it is made on another optimizer or model than the one that is trained.

Cure: call `optimizer.zero_grad()` once per update, right after `optimizer.step()` or before the next forward pass. With
accumulation over several micro-batches, call it once per update too, not once per micro-batch.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import GradientsNeverCleared
from torchmedic.diagnose.cures.edits import line_added_after
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.replay.trace.values import number


@loop_rule("TM601", "gradients-never-cleared", GradientsNeverCleared)
def check(evidence: LoopEvidence, incident: GradientsNeverCleared) -> Draft | None:
    name = evidence.optimizer_name(incident.cause) or "optimizer"
    before, after = incident.norms
    draft = check.draft(evidence, "proven")
    draft.message = f"gradients are never cleared: every update uses those of all {incident.updates} steps so far"
    draft.cause = "backward adds to the gradients, and nothing has cleared them between the updates"
    draft.at(
        evidence.at("cause", incident.cause, "the gradients it has used stay, and the next ones are added", "step"),
        evidence.at("surfaced", incident.backward, "adds to what is there", "backward"),
    )
    draft.because(
        f"before backward, where it should be 0, the norm of one gradient went from {number(before)} to "
        f"{number(after)} in the last steps",
        "the same gradient tensor has been in place at every update, and only backward has written to it",
    )
    return draft.help(
        f"clear them after the update: {name}.zero_grad()",
        patch=line_added_after(incident.cause, f"{name}.zero_grad()"),
        safety="changes-training",
    )
