"""The learning rate is so high that the updates make the loss larger.

What: some steps were run again from a copy of the weights. As they were, the loss grew again and did not
come back; with a lower learning rate and nothing else changed, the loss fell or at least did not grow.

Why: an update that is too large overshoots the minimum, lands where the slope is steeper, and the next update is larger
still. The operation that overflows in the end is not at fault.

Cure: lower the learning rate to about the rate that is named, or warm it up to a higher one.
"""

from __future__ import annotations

from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate, rate_location, rates_of
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Grade
from torchmedic.replay.trajectory.change import Change
from torchmedic.replay.trajectory.course import Course
from torchmedic.source.lookup.named_numbers import set_and_used
from torchmedic.source.lookup.optimizers import base_of, peak_of

_DIVISORS = (3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
_LAST_OF_ORDINARY = 1000  # an ordinary rate is not divided by more
_LAST_ORDINARY = 1 / 100  # a rate that is ordinary and has to be lowered further than that is not the whole cause
_FAST_GROWTH = 30.0  # times the loss that the same batch has with the weights of before
_SHOWN = 2  # courses that did not turn
_MAX_GROUPS = 4  # that are tried one by one

Tried = list[tuple[float, Course]]  # factors of the rate, and their courses


@rule("TM230", "learning-rate-too-high")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if divergence is None or divergence.is_falling or evidence.incident.quantity == "rate":
        return None
    tried = _first_that_turns(divergence, None)
    if tried is None:
        return None
    if not divergence.optimizers:
        return _by_hand(evidence, divergence, tried)
    optimizer, group, tried = _to_blame(divergence, tried)
    factor = tried[-1][0]
    rates = rates_of(divergence, optimizer, group) if optimizer is not None else []
    if not rates or rates[0] < 0:
        return None
    outcome = divergence.outcome(tried[-1][1])
    rate, lower = rates[0], _rounded(rates[0] * factor)
    is_whole_cause = factor >= _LAST_ORDINARY and not _has_endless_velocity(optimizer)
    grade: Grade = "proven" if is_whole_cause or not is_ordinary_rate(divergence) else "likely"
    draft = begin(
        check,
        evidence,
        divergence,
        f"the learning rate of {rate:.6g} is too high",
        f"with a rate of {rate:.6g} the updates make the loss larger; with {lower} {outcome}",
        grade=grade,
    )
    cause = rate_location(evidence, optimizer, rate, group)
    written = peak_of(optimizer, group) or base_of(optimizer, rate, group) or rate
    draft.at(*set_and_used(written, cause, f"the value {written:.6g} is written here"))
    labelled = [(f"with {_rounded(rate * factor)}", course) for factor, course in tried]
    title = f"lower the learning rate from {written:.6g} to about {_rounded(written * factor)}"
    draft.treat(cure(divergence, title, labelled[-_SHOWN:]))
    clipped = divergence.course(Change("gradients clipped at 1", clip=1.0))
    if divergence.turns(clipped):
        title = "or clip the gradients: torch.nn.utils.clip_grad_norm_(parameters, 1.0)"
        draft.treat(cure(divergence, title, [("clipped", clipped)]))
    return finish(draft, evidence)


def _first_that_turns(divergence: Divergence, only: Any, group: int | None = None) -> Tried | None:
    """The courses with lower and lower rates, up to the first one that turns."""
    tried = []
    is_fast = divergence.has_grown_by(_FAST_GROWTH)
    most = _LAST_OF_ORDINARY if is_ordinary_rate(divergence) else _DIVISORS[-1]
    for divisor in _DIVISORS:
        if divisor > most:
            break
        factor = 1 / divisor
        label = f"rate / {divisor}" + (f" of optimizer {id(only)}, group {group}" if only is not None else "")
        course = divergence.course(Change(label, rate=factor, only=only, group=group))
        if course is None:
            return None
        tried.append((factor, course))
        # A loss that grows slowly would hardly grow in a few updates at any lower rate: it has to fall.
        if divergence.turns(course) and (is_fast or divergence.falls(course)):
            return tried
    return None


def _by_hand(evidence: NumbersEvidence, divergence: Divergence, tried: Tried) -> Draft | None:
    """The loop updates its weights itself: the rate is a number of the update that the script gives a name."""
    divisor = round(1 / tried[-1][0])
    outcome = divergence.outcome(tried[-1][1])
    op = divergence.update_op()
    if op is None or op.spot is None:
        return None
    written = [
        (factor, location)
        for factor in divergence.factors_of_update()
        for location in set_and_used(factor, None, f"the learning rate is {factor:.6g}")
    ]
    rate, location = written[0] if len(written) == 1 else (None, None)
    draft = begin(
        check,
        evidence,
        divergence,
        "the step size of the update is too high" if rate is None else f"the learning rate of {rate:.6g} is too high",
        f"the updates make the loss larger; with updates of 1/{divisor} of the size {outcome}",
    )
    draft.at(location)
    draft.at(op.spot.location("cause" if location is None else "writer", "the weights are updated here"))
    labelled = [(f"divided by {round(1 / factor)}", course) for factor, course in tried]
    title = f"divide the learning rate by about {divisor}"
    title += "" if rate is None else f", from {rate:.6g} to {_rounded(rate / divisor)}"
    draft.treat(cure(divergence, title, labelled[-_SHOWN:]))
    return finish(draft, evidence)


def _to_blame(divergence: Divergence, tried: Tried) -> tuple[Any, int | None, Tried]:
    """The optimizer whose rate alone turns the course, and the group of its parameters where that is one of several."""
    optimizers = divergence.optimizers
    optimizer = optimizers[0] if len(optimizers) == 1 else None
    for each in optimizers if optimizer is None else ():
        alone = _first_that_turns(divergence, each)
        if alone is not None:
            optimizer, tried = each, alone
            break
    groups = optimizer.param_groups if optimizer is not None else []
    if len({group.get("lr") for group in groups}) > 1 and len(groups) <= _MAX_GROUPS:
        turning = [
            (at, alone)
            for at in range(len(groups))
            if (alone := _first_that_turns(divergence, optimizer, at)) is not None
        ]
        if len(turning) == 1:
            return optimizer, *turning[0]
    return optimizer, None, tried


def _has_endless_velocity(optimizer: Any) -> bool:
    momenta = [group.get("momentum") for group in optimizer.param_groups]
    return any(isinstance(momentum, int | float) and momentum >= 1 for momentum in momenta)


def _rounded(rate: float) -> str:
    """A rate that a person would write."""
    return f"{float(f'{rate:.1g}'):g}"
