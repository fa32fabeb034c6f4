"""The loss is a sum over the batch, or gradients of many batches are added up: they are as many times too large.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
the loss divided by the number of its elements, or of the batches of an update, and nothing else changed, the loss fell.

Why: the gradient of a sum grows with the number of elements. A learning rate that is right for a mean is then too high.

Cure: take the mean: `loss.mean()`, `reduction="mean"`; in a loop that adds up losses, or calls `backward()` for
several batches before an update, divide by their number.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.step.step_notes import line_of
from torchmedic.records import Location
from torchmedic.replay.trajectory.change import Change
from torchmedic.source.live_frames import place as frame_place
from torchmedic.source.lookup.named_numbers import reduction_written_at

_MIN_ELEMENTS = 8
_MIN_BATCHES = 4


@rule("TM231", "loss-summed-not-averaged")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if divergence is None or not is_ordinary_rate(divergence) or divergence.first_step() is None:
        return None
    count, _, factor = divergence.trajectory.reduction
    op = divergence.trajectory.reduced_at
    if op is not None and op.spot is not None and count >= _MIN_ELEMENTS:
        added, times = f"{count / factor:.6g}", f"{count:.6g}"
        by = f"{1 / factor:.6g}" if factor < 1 else ""
        message = f"the loss is summed over {added} elements{by and f' and divided by {by}'}, not averaged"
        why = f"the loss adds up {added} elements{by and f' and divides the sum by {by}'}, "
        why += f"so its gradients are {times} times those of their mean"
        label = f"the sum of {added} elements"
        is_told = hasattr(divergence.trajectory.reduction.node, "_saved_reduction")  # and no call of `sum`
        written = reduction_written_at("sum", "cause", label) if is_told else None
        place = written or op.spot.location("cause", label)
        return _divided(evidence, divergence, count, (message, why), place)
    unit = divergence.trajectory.units[0]
    batches = unit.batches
    if batches < _MIN_BATCHES or factor * batches < _MIN_BATCHES:
        return None
    message = f"the gradients of {batches} batches are added up, not averaged"
    why = f"every update follows {batches} calls of backward, and none of the losses is divided by {batches}"
    point = unit.call.points[0]
    line = line_of(point.code, point.lasti)
    place = frame_place("cause", point.code.co_filename, line, f"called {batches} times per update")
    return _divided(evidence, divergence, batches, (message, why), place)


def _divided(
    evidence: NumbersEvidence, divergence: Divergence, count: float, texts: tuple[str, str], place: Location
) -> Draft | None:
    """The diagnosis, if a loss that is divided turns the course."""
    course = divergence.course(Change(f"loss divided by {count:.6g}", gradient=1 / count))
    if not divergence.turns(course):
        return None
    draft = begin(check, evidence, divergence, *texts)
    draft.at(place)
    draft.treat(cure(divergence, f"average the loss: divide it by {count:.6g}", [("divided", course)]))
    return finish(draft, evidence)
