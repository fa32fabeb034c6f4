"""A recurrence multiplies its values by a factor above 1 in every turn, until they overflow.

What: the same line runs once per time step, and its values, or the gradients through it, are a constant factor larger
each time. The diagnosis names the line, the number of turns and the factor.

Why: a state that is multiplied by the same weights again and again grows like a power of their largest eigenvalue.

Cure: bound the state (`tanh`, a normalisation, a gated cell such as `nn.GRU`), begin with smaller or orthogonal
weights, clip the gradients, or use shorter sequences.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._growths import growths_at_start
from torchmedic.diagnose.rules.numbers._wording import noticed, victim
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.values import number
from torchmedic.source.assignments import names_written, read_first
from torchmedic.source.syntax import LOOPS, has_line, nodes_in, syntax_tree

_MIN_TURNS = 6


@rule("TM232", "exploding-recurrence")
def check(evidence: NumbersEvidence) -> Draft | None:
    grown, is_start = growths_at_start(evidence)
    found = next((each for each in grown if each.is_recurrence and each.turns >= _MIN_TURNS), None)
    if found is None:
        return None
    if found.kind in ("mul", "div", "pow"):  # a factor of the script's own: the line that closes the loop says more
        closing = [each for each in grown if each.is_recurrence and _closes_loop(each.spot)]
        found = max(closing, key=lambda each: each.factor, default=found)  # lower: the line has several such operations
    what = "the gradients of a recurrence grow" if found.is_gradient else "the values of a recurrence grow"
    draft = check.draft(evidence, "proven" if is_start else "likely")
    draft.message = f"{what} {found.factor:.3g} times in each turn and made {victim(evidence)}"
    draft.cause = f"this line runs again and again, and multiplies by about {found.factor:.3g} each time"
    span = f"from {number(found.first)} to {number(found.last)} in {found.turns} turns"
    draft.at(found.spot.location("cause", f"{'gradients' if found.is_gradient else 'values'} grow {span}"))
    draft.mark(evidence.spot, "surfaced", "a value overflowed here at last")
    draft.because("" if is_start else "the weights had been trained for some steps when this was seen")
    draft.help("bound the state in every turn (tanh, normalisation, a gated cell), or begin with smaller weights")
    if found.is_gradient:
        draft.help("clip the gradients: torch.nn.utils.clip_grad_norm_(parameters, 1.0)", safety="changes-training")
    return draft.because(noticed(evidence))


def _closes_loop(spot: Spot) -> bool:
    """Whether a line binds what the next turn of its loop begins with."""
    tree = syntax_tree(spot.file)
    loops = [node for node in nodes_in(tree) if isinstance(node, LOOPS) and has_line(node, spot.line)]
    if not loops:
        return False
    body = max(loops, key=lambda loop: loop.lineno).body
    written = {name for statement in body if has_line(statement, spot.line) for name in names_written(statement)}
    return not written.isdisjoint(read_first(body))
