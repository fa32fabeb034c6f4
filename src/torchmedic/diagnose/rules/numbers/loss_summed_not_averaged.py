"""The loss is a sum over the batch, so that the gradients are as many times too large.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
the loss divided by the number of its elements and nothing else changed, the loss fell.

Why: the gradient of a sum grows with the number of elements. A learning rate that is right for a mean is then too high.

Cure: take the mean: `loss.mean()`, `reduction="mean"`; in a loop that adds up losses, divide by their number.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trajectory.change import Change

_MIN_ELEMENTS = 8


@rule("TM231", "loss-summed-not-averaged")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if divergence is None or not is_ordinary_rate(divergence):
        return None
    scope = divergence.first_step()
    count, _ = divergence.trajectory.reduction
    op = divergence.trajectory.reduced_at
    if scope is None or op is None or op.spot is None or count < _MIN_ELEMENTS:
        return None
    course = divergence.course(Change("loss divided", gradient=1 / count))
    if not divergence.turns(course):
        return None
    whole = f"{count:.6g}"
    draft = begin(
        check,
        evidence,
        divergence,
        f"the loss is summed over {whole} elements, not averaged",
        f"the loss adds up {whole} elements, so its gradients are {whole} times those of their mean",
    )
    draft.at(op.spot.location("cause", f"the sum of {whole} elements"))
    draft.treat(cure(divergence, f"average the loss: divide it by {whole}", [("divided", course)]))
    return finish(draft, evidence)
