"""A single batch throws the weights so far off that training does not recover.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
one batch left out and nothing else changed, the loss stayed as it was. The loss of this batch is many times that of
the others even with the weights of before.

Why: items with extreme values (a wrong unit, a placeholder such as -999999, an overflow in the preparation) have
extreme gradients.

Cure: repair or drop these items, limit the values, or clip the gradients.
"""

from __future__ import annotations

import ast
from statistics import median

import msgspec
import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish
from torchmedic.evidence.data_makers import made_at
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.step.items import items_of
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.records import Location
from torchmedic.replay.trajectory.change import Change
from torchmedic.replay.trajectory.units import Unit
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import nodes_in, syntax_tree
from torchmedic.source.user_variables import loaded_files

_OUTLIER = 30.0  # times the loss of the other batches
_OUTLYING_ITEM = 30.0  # times the usual size of an item
_MIN_BATCHES = 3


@rule("TM235", "poisonous-batch")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    position = _outlier(divergence) if divergence is not None else None
    if divergence is None or position is None or divergence.is_falling:
        return None
    tensor, rows = _outlying(divergence, position)
    if tensor is None and position == divergence.positions[-1]:
        return None  # the steps from then on may all have such a loss, as one with a new term
    unit = divergence.trajectory.units[position]
    course = divergence.course(Change(f"without batch {position}", without=position))
    if course is None or not course.is_finite or not divergence.is_bounded(course, leave_out=position):
        return None
    step, ratio = unit.call.step, _ratio(divergence, position)
    draft = begin(
        check,
        evidence,
        divergence,
        f"the batch of step {step} threw the weights off",
        f"with the same weights the loss of this batch is {ratio:.3g} times that of the others",
    )
    items = _items(unit, rows)
    label = f"extreme values in {items}" if items else "extreme values in this batch"
    if tensor is not None:
        draft.at(_literal(tensor, rows, label) or made_at(evidence.frames, unit.call, tensor, label, row=rows[0]))
    if not draft.has_place:
        draft.mark(evidence.noticed, "cause", label)
    draft.because(f"the extreme values of step {step} are in {items}" if items else "")
    treatment = cure(divergence, f"repair or drop {items or 'this batch'}", [("without it", course)])
    rest = [abs(course.losses[at]) for at in divergence.positions if at != position]
    is_healthy = max(rest) <= _OUTLIER * _usual(divergence, position)  # else more batches are poisonous
    draft.treat(msgspec.structs.replace(treatment, proven=is_healthy))
    return finish(draft, evidence)


def _outlier(divergence: Divergence) -> int | None:
    """The step whose batch has by far the largest loss, whatever the weights."""
    positions = [at for at in divergence.positions if divergence.trajectory.units[at].is_update]
    if len(positions) < _MIN_BATCHES:
        return None
    largest = max(positions, key=lambda at: abs(divergence.still.losses[at]))
    return largest if _ratio(divergence, largest) > _OUTLIER else None


def _ratio(divergence: Divergence, position: int) -> float:
    return abs(divergence.still.losses[position]) / _usual(divergence, position)


def _usual(divergence: Divergence, position: int) -> float:
    """The loss of the other batches."""
    return max(median(abs(divergence.still.losses[at]) for at in divergence.positions if at != position), 1e-12)


def _outlying(divergence: Divergence, position: int) -> tuple[torch.Tensor | None, list[int]]:
    """The tensor of the batch with extreme rows, and those rows."""
    units = divergence.trajectory.units
    others = [_given(unit) for at, unit in enumerate(units) if at != position]
    for at, tensor in enumerate(_given(units[position])):
        sizes = _sizes(tensor)
        if sizes is None:
            continue
        alike = [_sizes(other[at]) for other in others if len(other) > at]
        usual = torch.cat([sizes, *(each for each in alike if each is not None)]).median().clamp(min=1e-12)
        rows = (sizes > _OUTLYING_ITEM * usual).nonzero().flatten().tolist()
        if rows:
            return tensor, rows
    return None, []


def _given(unit: Unit) -> list[torch.Tensor]:
    """The tensors that a step was given."""
    namespace = unit.step.runner._namespace()
    batch = unit.call.batch
    return tensors_in(batch) if batch is not None else [v for v in namespace.values() if type(v) is torch.Tensor]


def _sizes(tensor: torch.Tensor) -> torch.Tensor | None:
    """The largest magnitude in each row of data; None where a tensor is no data with rows."""
    if not tensor.is_floating_point() or tensor.requires_grad or tensor.dim() == 0 or tensor.shape[0] < 2:
        return None
    return tensor.detach().reshape(tensor.shape[0], -1).abs().amax(1)


def _literal(tensor: torch.Tensor, rows: list[int], label: str) -> Location | None:
    """The only number in the user's files that is the extreme value."""
    values = tensor[rows[0]].detach().flatten()
    extreme = float(values[values.abs().argmax()])
    found = [
        (file, node)
        for file in loaded_files()
        for node in nodes_in(syntax_tree(file))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value
        if float(torch.tensor(node.value, dtype=tensor.dtype)) == abs(extreme)
    ]
    return node_location("cause", *found[0], label) if len(found) == 1 else None


def _items(unit: Unit, rows: list[int]) -> str:
    if not rows:
        return ""
    known = items_of(unit.call.origin)
    if isinstance(known, list | tuple) and len(known) > max(rows):
        names = ", ".join(str(known[row]) for row in rows[:5])
        return f"dataset item{'s' if len(rows) > 1 else ''} {names}"
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:5]))} of the batch"
