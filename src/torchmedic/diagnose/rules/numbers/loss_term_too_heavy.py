"""One term of the loss has so large a weight that an ordinary learning rate is too high.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
the gradient of one term of the loss divided and nothing else changed, the loss fell. A weight of the whole loss, as a
scale that is never taken out of the gradients, is tried in the same way.

Why: the gradient of a term grows with the number that the term is multiplied by. A penalty with a weight of 1e5 needs a
learning rate that is 1e5 times smaller than the other terms of the loss.

Cure: lower the weight of the term to about the weight that is named.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate, locate_factor
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trajectory.change import Change
from torchmedic.replay.trajectory.terms import Term

_MIN_WEIGHT = 30.0  # times the smallest weight of another term
_DIVISORS = (10, 100, 1000, 10_000, 100_000, 1_000_000)


@rule("TM238", "loss-term-too-heavy")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if divergence is None or divergence.is_falling or divergence.first_step() is None:
        return None
    term = _heaviest(divergence)
    if term is None or term.op is None or term.op.spot is None or not is_ordinary_rate(divergence):
        return None
    for divisor in _DIVISORS:
        change = Change(f"term {term.path} divided by {divisor}", term=(term.path, 1 / divisor))
        course = divergence.course(change)
        if course is None:
            return None
        if not divergence.turns(course):
            continue
        lower = f"{float(f'{term.weight / divisor:.1g}'):g}"
        of = "of a term of the loss" if len(divergence.trajectory.terms) > 1 else "of the loss"
        message = f"the weight {term.weight:.6g} {of} is too large"
        outcome = divergence.outcome(course)
        why = f"with a weight of {term.weight:.6g} every update makes the loss larger; with {lower} {outcome}"
        draft = begin(check, evidence, divergence, message, why)
        locate_factor(draft, term.op.spot, f"this is multiplied by {term.weight:.6g}", term.weight)
        title = f"lower the weight from {term.weight:.6g} to about {lower}"
        draft.treat(cure(divergence, title, [(f"with {lower}", course)]))
        return finish(draft, evidence)
    return None


def _heaviest(divergence: Divergence) -> Term | None:
    """The term with the largest weight, if it is many times that of another term, or of a loss without a weight."""
    terms = sorted(divergence.trajectory.terms, key=lambda term: term.weight)
    lightest = max(1.0, terms[0].weight) if len(terms) > 1 else 1.0
    return terms[-1] if terms and terms[-1].weight >= _MIN_WEIGHT * lightest else None
