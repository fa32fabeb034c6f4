"""The updates go uphill: the loss is maximised.

What: the last steps were run again from a copy of the weights. As they were, a loss that should become small grew
without bound, or its negative did; with the opposite sign, at the same learning rate, the loss fell.

Why: the sign of the loss or of the update is wrong: a minus in front of a loss that is to become small,
`maximize=True`, or a log-likelihood without its minus.

Cure: turn the sign round.
"""

from __future__ import annotations

from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, location_of
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Diagnosis, Grade, Location
from torchmedic.replay.trace.microscope import Microscope, Op
from torchmedic.replay.trajectory.course import Change, Course
from torchmedic.source.lookup.optimizers import built_at

_NEVER_NEGATIVE = (
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "square",
    "pow",
    "abs",
)


@rule("TM236", "loss-maximised")
def check(evidence: NumbersEvidence) -> Diagnosis | None:
    divergence = evidence.divergence
    if divergence is None:
        return None
    course = divergence.course(Change("the other sign", gradient=-1.0))
    if course is None or not course.is_finite or len(course.losses) < len(divergence.still.losses):
        return None
    if divergence.turns(course) and not divergence.is_falling:
        # Uphill, and downhill with the same rate: not too large a step.
        draft = _begin(evidence, divergence, "the updates go uphill", "proven")
        optimizer = next((each for each in divergence.optimizers if each.param_groups[0].get("maximize")), None)
        if optimizer is not None:
            draft.at(_built_at(evidence, optimizer))
        elif not divergence.optimizers:
            draft.at(location_of(divergence.update_spot(), "this moves the weights uphill, along the gradient"))
        return _finish(draft, evidence, divergence, course)
    if not divergence.is_falling or not _shrinks(divergence, course):
        return None
    scope = divergence.first_step()
    last = _last(scope) if scope is not None else None
    grade: Grade = "proven" if last is not None and last[1] else "likely"
    draft = _begin(evidence, divergence, "the loss falls without bound", grade)
    if last is not None:
        draft.at(location_of(last[0].spot, "this is to become small, and is made ever more negative"))
    return _finish(draft, evidence, divergence, course)


def _begin(evidence: NumbersEvidence, divergence: Divergence, message: str, grade: Grade) -> Draft:
    why = "at the same learning rate the loss runs away, and with the opposite sign it does not"
    return begin(check, evidence, divergence, message, why, grade=grade)


def _finish(draft: Draft, evidence: NumbersEvidence, divergence: Divergence, course: Course) -> Diagnosis | None:
    if not draft.has_place:
        return None
    what = "update" if not divergence.optimizers else "loss"
    draft.treat(cure(divergence, f"turn the sign of the {what} round", [("with the other sign", course)]))
    return finish(draft, evidence)


def _shrinks(divergence: Divergence, course: Course) -> bool:
    """Whether the loss gets smaller in size, batch by batch."""
    pairs = list(zip(divergence.losses(course), divergence.losses(divergence.still), strict=True))
    return len(pairs) > 1 and all(abs(now) <= 1.1 * abs(before) for now, before in pairs)


def _last(scope: Microscope) -> tuple[Op, bool] | None:
    """The negation that makes the loss, else its reduction; and whether it negates what is never negative."""
    forward = [op for op in scope.ops if not op.derived and not op.node and op.spot is not None]
    for op in reversed(forward[-6:]):
        if op.kind == "neg":
            return op, any(kind in each.kind for each in forward for kind in _NEVER_NEGATIVE)
    for op in reversed(forward):
        if op.kind in ("mean", "sum"):
            return op, False
    return None


def _built_at(evidence: NumbersEvidence, optimizer: Any) -> Location | None:
    by = evidence.agent.clock.constructions.get(optimizer)
    return built_at(evidence.frames, optimizer, "cause", "`maximize=True` makes the loss larger", by=by)
