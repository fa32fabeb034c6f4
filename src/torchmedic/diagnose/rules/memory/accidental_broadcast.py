"""Two tensors of the same length were stretched to a table of all pairs.

What: an operation was given [N, 1] and [N]. It paired every element of one with every element of the other, and the
result of N x N elements did not fit, or filled the memory for what came after it.

Why: a prediction still has its last dimension of 1 and the target does not (or the other way round). Broadcasting makes
that legal. With a small batch the same line runs and gives a wrong loss.

Cure: bring both to the same shape before the operation, with `.squeeze(-1)` or `.unsqueeze(-1)`.
"""

from __future__ import annotations

import math

import torch

from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import noticed, table
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.holdings import Result, results_of
from torchmedic.replay.memory.autopsy import Autopsy, autopsy_of
from torchmedic.replay.memory.ledger import Made

CODE, NAME = "TM404", "accidental-broadcast"


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None:
        return None
    asked = autopsy.asked
    made = [each for each in results_of(evidence.calls) if each.nbytes > 1 << 20]
    if asked is None and made:
        asked = made[0].nbytes
    direct = next((each for each in made if asked and _about(each.nbytes, asked) and _is_accident(each)), None)
    if direct is not None:
        one, two = direct.operands
        return _said(autopsy, one, two, direct.shape, direct.nbytes, evidence.at_user_line("cause", "stretched here"))
    earlier = _earlier(autopsy)
    if earlier is None or earlier.place.spot is None:
        return None
    one, two = _pair(earlier)
    label = f"{size(earlier.nbytes)} made here"
    places = (earlier.place.spot.location("cause", label), *noticed(autopsy))
    return _said(autopsy, one, two, earlier.shape, earlier.nbytes, places)


def _said(
    autopsy: Autopsy,
    one: tuple[int, ...],
    two: tuple[int, ...],
    shape: tuple[int, ...],
    nbytes: int,
    places: tuple[object, ...],
) -> Diagnosis:
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"{list(one)} and {list(two)} broadcast to {list(shape)}, which takes {size(nbytes)}",
        f"both have {math.prod(one)} elements; together they were paired to {math.prod(shape)}",
    )
    draft.at(*places)  # type: ignore[arg-type]
    draft.because(*table(autopsy))
    draft.help("bring both to the same shape first, for example with `.squeeze(-1)` or `.unsqueeze(-1)`")
    return draft.done(step=autopsy.evidence.incident.step, rank=autopsy.evidence.incident.rank)


def _earlier(autopsy: Autopsy) -> Made | None:
    """A table of pairs that the failing step had made before it ran out."""
    ledger = autopsy.replayed
    everything = max(1, autopsy.book.everything, autopsy.measured.used)
    tables = [
        each
        for each in (ledger.made if ledger is not None else ())
        if each.nbytes >= everything // 8 and (pair := _pair(each)) and _grew(*pair, each.shape)
    ]
    return max(tables, key=lambda each: each.nbytes, default=None)


def _pair(made: Made) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shapes = [shape for shape in made.inputs if shape]
    return (shapes[0], shapes[1]) if len(shapes) == 2 else ((), ())


def _about(nbytes: int, asked: int) -> bool:
    return abs(nbytes - asked) <= max(512, asked // 100)


def _is_accident(result: Result) -> bool:
    return len(result.operands) == 2 and _grew(*result.operands, result.shape)


def _grew(one: tuple[int, ...], two: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Two of the same number of elements and a different number of dimensions, as [N, 1] and [N] are."""
    if not one or not two or len(one) == len(two) or math.prod(one) != math.prod(two):
        return False
    try:
        together = tuple(torch.broadcast_shapes(one, two))
    except RuntimeError:
        return False
    return together == tuple(shape) and math.prod(shape) >= 16 * math.prod(one)


RULE = Rule(CODE, NAME, check)
