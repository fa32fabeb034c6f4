"""The updates go uphill: the loss is maximised.

What: the last steps were run again from a copy of the weights. As they were, a loss that should become small grew
without bound, and with the opposite sign, at the same learning rate, the loss fell. Or the loss is far below zero,
every update lowers it, and it is a negated error (`-mse`, a log-likelihood without its minus) that has no lower bound.
Or the loss was above zero, is below it, and a penalty that is subtracted outweighs all other terms.

Why: the sign of the loss, of one of its terms or of the update is wrong: a minus in front of a loss that is to become
small, `maximize=True`, a learning rate that fell below 0, or a log-likelihood without its minus.

Cure: flip the sign.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, rate_location, rates_of
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import Grade, Location, Treatment
from torchmedic.replay.trajectory.change import OTHER_SIGN, Change
from torchmedic.replay.trajectory.course import Course
from torchmedic.replay.trajectory.loss_sign import has_no_lower_bound
from torchmedic.replay.trajectory.terms import Term, terms_of
from torchmedic.source.lookup.optimizers import built_at

_MAX_TERMS = 4  # each is tried
_MIN_FALLS = 3  # in a row
_FAR_BELOW = 1e4  # times the size of the loss without updates, or with those of the opposite sign
_DOMINANT = 20  # times as large as the next term


@rule("TM236", "loss-maximised")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if evidence.incident.quantity == "sunk":
        return _sunk(evidence)
    if divergence is None:
        return None
    course = divergence.course(OTHER_SIGN)
    is_whole = course is not None and course.is_finite and len(course.losses) >= len(divergence.still.losses)
    if divergence.is_falling:
        return _falling(evidence, divergence, course if is_whole else None)
    if course is None or not is_whole or not divergence.turns(course):
        return None
    # Uphill, and downhill with the same rate: not too large a step.
    why = "at the same learning rate the loss runs away, and with the opposite sign it does not"
    draft = begin(check, evidence, divergence, "the updates go uphill", why)
    optimizer = next((each for each in divergence.optimizers if each.param_groups[0].get("maximize")), None)
    lowest = [(min(rates), each) for each in divergence.optimizers if (rates := rates_of(divergence, each))]
    rate, negative = next((pair for pair in lowest if pair[0] < 0), (0.0, None))
    if optimizer is not None:
        draft.at(_built_at(evidence, optimizer))
    elif negative is not None:
        draft.at(rate_location(evidence, negative, rate))
    elif not divergence.optimizers:
        op = divergence.update_op()
        spot = op.spot if op is not None else None
        draft.at(spot.location("cause", "this moves the weights uphill, along the gradient") if spot else None)
    if not draft.has_place:
        return None
    draft.treat(_cure(divergence, course, "learning rate" if negative is not None else "loss"))
    return finish(draft, evidence)


def _falling(evidence: NumbersEvidence, divergence: Divergence, course: Course | None) -> Draft | None:
    """A loss that runs away downwards: whether it is an error with the wrong sign."""
    divergence.first_step()  # reads the graph of the loss
    sign, is_error, op, is_whole, is_turned = divergence.trajectory.sign
    is_growth, is_lost = evidence.incident.quantity == "growth", evidence.agent.finite.memory.is_lost
    trained = parameters_of(*divergence.optimizers)
    shrinks = course is not None and _shrinks(divergence, course)
    grade: Grade
    if sign < 0 and (is_error or is_lost or not is_growth) and len(trained) != 1:
        # One tensor alone may be meant to have a large loss, as the input of an attack.
        part = "the loss" if is_whole else "a part of the loss that outweighs the others"
        grade, why = "proven", f"{part} can only be negative, so it has no lower bound, and every update lowers it"
    elif sign == 0 and shrinks and divergence.has_grown:
        grade, why = "likely", "the loss runs away downwards, and with the opposite sign its size shrinks"
    elif sign == 0 and course is not None and divergence.has_grown and _only_falls(divergence, course):
        grade, why = "likely", "every update lowers the loss, far below zero, and with the opposite sign it stays small"
    else:
        return None
    spot = op.spot if op is not None else None
    term, turned = (None, None) if is_turned and is_whole else _term_to_turn(divergence)
    if term is not None and term.op is not None and term.op.spot is not None:
        spot, course, shrinks = term.op.spot, turned, True
        grade, why = "proven", "with the opposite sign of this term alone, the size of the loss shrinks"
    if spot is None:
        return None
    lowest = min(loss for loss in (0.0, *evidence.incident.losses) if math.isfinite(loss))
    draft = check.draft(evidence, grade, f"the loss falls without bound: it has come to {lowest:.3g}", why)
    draft.at(spot.location("cause", "this is made ever more negative"))
    if course is not None and shrinks:
        draft.treat(_cure(divergence, course, "term" if term is not None else "loss"))
    else:
        other = "flip the sign of the loss"
        bound = "bound the negative part from below, as a hinge with a margin does, or turn its sign round"
        draft.help(other if is_whole and sign else bound, safety="changes-training")
    return finish(draft, evidence)


def _sunk(evidence: NumbersEvidence) -> Draft | None:
    """A weighted term that can only be negative, and outweighs all others: a penalty with the wrong sign.

    A difference of two terms without a weight, as of energies, may be meant to fall below zero.
    """
    scope, played, optimizers = evidence.scope, evidence.played, evidence.incident.optimizers
    if scope is None or played is None or evidence.has_stand_ins or len(optimizers) != 1:
        return None  # an adversary may be meant to fail
    groups = optimizers[0].param_groups
    roots = [root for root in played.roots if root.numel() == 1]
    if not roots or any(group.get("maximize") or not group.get("lr", 1) > 0 for group in groups):
        return None
    terms = terms_of(roots[-1], scope)
    found = max(terms, key=lambda term: term.size)
    others = sum(term.size for term in terms if term is not found)
    if len(terms) < 2 or not 0 < others < found.size or found.weight >= 1 or found.op is None or found.op.spot is None:
        return None
    if len(parameters_of(*optimizers)) < 2 or not has_no_lower_bound(roots[-1], found, scope):
        return None
    message = f"the loss falls without bound: it has come to {roots[-1].item():.3g}"
    why = f"a term of the loss can only be negative, here {-found.size:.3g}, and outweighs the others"
    draft = check.draft(evidence, "likely", message, why)
    draft.at(found.op.spot.location("cause", "this is made ever more negative"))
    draft.mark(evidence.noticed, "surfaced", "noticed here")
    draft.because(f"the loss was above zero at first, and the other terms come to {others:.3g}")
    return draft.help("flip the sign of the term", safety="changes-training")


def _term_to_turn(divergence: Divergence) -> tuple[Term | None, Course | None]:
    """The only term of a sum with whose opposite sign the loss no longer falls; None where there is no such term."""
    terms = divergence.trajectory.terms
    found: list[tuple[Term, Course]] = []
    for term in terms if 1 < len(terms) <= _MAX_TERMS else ():
        course = divergence.course(Change(f"term {term.path} with the other sign", term=(term.path, -1.0)))
        is_whole = course is not None and course.is_finite and len(course.losses) >= len(divergence.still.losses)
        if course is not None and is_whole and _shrinks(divergence, course):
            found.append((term, course))
    sizes = sorted(term.size for term in terms)
    if len(found) > 1 and sizes[-1] > _DOMINANT * sizes[-2] > 0:  # what the other terms do is noise
        found = [(term, course) for term, course in found if term.size == sizes[-1]]
    return found[0] if len(found) == 1 else (None, None)


def _cure(divergence: Divergence, course: Course, what: str = "loss") -> Treatment:
    what = what if divergence.optimizers else "update"
    return cure(divergence, f"flip the sign of the {what}", [("with the other sign", course)])


def _shrinks(divergence: Divergence, course: Course) -> bool:
    """Whether the loss gets smaller in size, batch by batch."""
    pairs = list(zip(divergence.losses(course), divergence.losses(divergence.still), strict=True))
    slack = 0.1 * max(abs(before) for _, before in pairs)  # some batches have next to no loss
    return len(pairs) > 1 and all(abs(now) <= abs(before) + slack for now, before in pairs)


def _only_falls(divergence: Divergence, course: Course) -> bool:
    """Whether each update lowered the loss, and much further than the opposite sign moves it."""
    losses = [loss for loss in divergence.losses(divergence.original) if math.isfinite(loss)]
    highest = max(map(abs, (*divergence.losses(course), *divergence.losses(divergence.still))))
    falls = all(after < before for before, after in itertools.pairwise(losses))
    return len(losses) > _MIN_FALLS and falls and losses[-1] < -_FAR_BELOW * highest


def _built_at(evidence: NumbersEvidence, optimizer: Any) -> Location | None:
    by = evidence.agent.clock.constructions.get(optimizer)
    return built_at(evidence.frames, optimizer, "cause", "`maximize=True` makes the loss larger", by=by)
