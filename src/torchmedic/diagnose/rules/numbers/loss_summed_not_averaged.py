"""The loss is a sum over the batch, so that the gradients are as many times too large.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
the loss divided by the number of its elements and nothing else changed, the loss fell.

Why: the gradient of a sum grows with the number of elements. A learning rate that is right for a mean is then too high.

Cure: take the mean: `loss.mean()`, `reduction="mean"`; in a loop that adds up losses, divide by their number.
"""

from __future__ import annotations

from collections import Counter

from torchmedic.diagnose.rule import rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate, location_of
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Diagnosis
from torchmedic.replay.trace.microscope import Microscope, Spot
from torchmedic.replay.trajectory.course import Change

_MIN_ELEMENTS = 8


@rule("TM231", "loss-summed-not-averaged")
def check(evidence: NumbersEvidence) -> Diagnosis | None:
    divergence = evidence.divergence
    if divergence is None or not is_ordinary_rate(divergence):
        return None
    scope = divergence.first_step()
    count, is_loop = divergence.trajectory.reduction
    if scope is None or count < _MIN_ELEMENTS:
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
    draft.at(location_of(_added_at(scope) if is_loop else _line(scope), f"the sum of {whole} elements"))
    draft.treat(cure(divergence, f"average the loss: divide it by {whole}", [("divided", course)]))
    return finish(draft, evidence)


def _added_at(scope: Microscope) -> Spot | None:
    """The addition that is run again and again."""
    spots = [op.spot for op in scope.ops if op.kind == "add" and not op.derived and not op.node and op.spot is not None]
    lines = Counter((spot.file, spot.line) for spot in spots)
    return max(reversed(spots), key=lambda spot: lines[spot.file, spot.line], default=None)


def _line(scope: Microscope) -> Spot | None:
    """The last reduction of the forward pass."""
    for op in reversed(scope.ops):
        is_loss = op.kind == "sum" or "loss" in op.kind or op.kind.startswith("binary_cross_entropy")
        if is_loss and not op.derived and not op.node and op.spot is not None:
            return op.spot
    return None
