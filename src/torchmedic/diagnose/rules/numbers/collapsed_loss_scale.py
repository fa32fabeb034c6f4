"""GradScaler skips every step, and its scale has collapsed.

What: GradScaler skips a step when a gradient is infinite, and halves its scale. This is normal from time to time. If it
happens in every step, the weights are never updated again, and no message is printed.

Why: the gradients are infinite or NaN at every scale: a bad value in the data or the model, or an overflow in the
forward pass.

Cure: find the first bad value in a step without the scaler; bfloat16 needs no scaler.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import noticed
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.step.trial import source_of
from torchmedic.replay.trace.values import number


@rule("TM224", "collapsed-loss-scale")
def check(evidence: NumbersEvidence) -> Draft | None:
    incident, watch = evidence.incident, evidence.agent.finite
    scaling = _is_scaling(evidence)
    if incident.quantity != "scale" or (evidence.births and not scaling):
        return None
    draft = check.draft(evidence, "proven" if scaling else "likely")
    draft.message = f"GradScaler has skipped the last {watch.skipped} steps"
    draft.cause = (
        f"the gradients were not finite in any of them, with a scale that is now {number(watch.lowest_scale or 0.0)}"
    )
    draft.mark(evidence.noticed, "cause", "skipped here, step after step")
    draft.because("the weights have not been updated since")
    if scaling:
        draft.because("the loss itself is finite; the product of loss and scale is not")
    draft.because(f"a replay of this step found no origin: {evidence.why_not}" if evidence.why_not else "")
    draft.help(
        "let `scaler.update()` choose the scale" if scaling else "run this step without GradScaler, or in bfloat16"
    )
    return draft.because(noticed(evidence))


def _is_scaling(evidence: NumbersEvidence) -> bool:
    """Whether the first bad value of the step is the scaled loss."""
    op, spot = evidence.op, evidence.spot
    if op is None or spot is None or op.kind != "mul" or evidence.loss_is_bad:
        return False
    return ".scale(" in source_of(spot)
