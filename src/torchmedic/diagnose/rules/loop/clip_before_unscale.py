"""Gradients are clipped while they are still multiplied by the scale of GradScaler.

What: after `scaler.scale(loss).backward()` all gradients are larger by the scale, often 65536 times. Clipping them to a
norm of 1.0, for example, then clips the real gradients to 1/65536: every update is very small, and becomes smaller as
the scale grows.

Why: `clip_grad_norm_` is called before `scaler.unscale_(optimizer)`; `scaler.step` divides only afterwards.

Cure: call `scaler.unscale_(optimizer)` before clipping. `scaler.step` then does not divide again.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ClipBeforeUnscale
from torchmedic.diagnose.cures.edits import line_added_before
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.replay.trace.values import number


@loop_rule("TM606", "clip-before-unscale", ClipBeforeUnscale)
def check(evidence: LoopEvidence, incident: ClipBeforeUnscale) -> Draft | None:
    bound = incident.bound
    draft = check.draft(evidence, "proven")
    draft.message = "gradients are clipped before GradScaler has divided them by its scale"
    draft.cause = f"the bound {number(bound)} is applied to gradients that are still multiplied by the loss scale"
    draft.at(
        evidence.at("cause", incident.cause, "the gradients are scaled here", "clip_grad_norm_", "clip_grad_value_"),
        evidence.at("surfaced", incident.update, "divides them, after they were clipped", "step"),
    )
    draft.because("seen in every update so far: `unscale_` was not called before clipping")
    name = evidence.optimizer_name(incident.update) or "optimizer"
    scaler = evidence.receiver(incident.update, "step") or "scaler"
    line = f"{scaler}.unscale_({name})"
    return draft.help(
        f"call `{line}` before it", patch=line_added_before(incident.cause, line), safety="changes-training"
    )
