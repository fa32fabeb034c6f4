"""Lines of a step whose values grow geometrically, from turn to turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import torch

from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Leaf, Microscope, Op
from torchmedic.source.spots import Spot

_MIN_TURNS = 4
_MIN_FACTOR = 1.15  # per turn
_MIN_SHARE_GROWING = 0.8  # of all turns
_MIN_TOTAL = 1e5
_MIN_TOTAL_OF_OUTLIER = 1e3  # in a step whose loss is huge without any update


def growths_at_start(evidence: NumbersEvidence) -> tuple[list[Growth], bool]:
    """The lines whose values grow geometrically, and whether they did so before training could spoil the weights."""
    if evidence.divergence is not None:
        scope = evidence.divergence.first_step()
        found = growths(scope) if scope is not None else []
        # A longer sequence has more turns, and a huge loss with the weights of before as well.
        scope = evidence.divergence.outlying_step() if not found else None
        longer = growths(scope, _MIN_TOTAL_OF_OUTLIER) if scope is not None else []
        return found or [each for each in longer if each.is_by_weights and each.gain > _MIN_FACTOR], True
    is_growth = evidence.incident.quantity == "growth"
    if evidence.scope is None or not (is_growth or (evidence.births and evidence.births[0].op is not None)):
        return [], False
    return growths(evidence.scope), evidence.incident.step == 0


class Growth(NamedTuple):
    """One line's values, growing by about the same factor each time that the line runs."""

    spot: Spot
    kind: str  # of the operation
    turns: int
    factor: float  # per turn
    first: float
    last: float  # the largest that is finite
    is_gradient: bool
    weights: tuple[
        torch.Tensor, ...
    ]  # that the line multiplies by: few for a recurrence, one per turn for a deep network
    gain: float  # of the operation itself, per turn: how many times its result is larger than what it is given
    is_by_weights: bool  # the operation itself multiplies by weights; else by a constant or by activations

    @property
    def is_recurrence(self) -> bool:
        return 2 * len(self.weights) <= self.turns


def growths(scope: Microscope, least: float = _MIN_TOTAL) -> list[Growth]:
    """The growths in a replayed step by a factor or more, the strongest amplifier first. The scope must be read."""
    found = []
    for is_gradient in (False, True):
        lines: dict[tuple[str, int], dict[str, list[Op]]] = {}
        for op in scope.ops:
            spot = scope.spot_of(op)
            if op.derived is is_gradient and spot is not None and op.outputs:
                lines.setdefault((spot.file, spot.line), {}).setdefault(op.kind, []).append(op)
        for kinds in lines.values():
            grown = [each for ops in kinds.values() if (each := _growth(scope, ops, is_gradient, least))]
            own = [op for ops in kinds.values() for op in ops] if grown else []
            # A line without weights of its own is a part of what runs between its turns.
            weights = tuple(_weights(scope, own)) or tuple(_weights(scope, _between(scope, own)))
            found += [growth._replace(weights=weights) for growth in grown]
    return sorted(found, key=lambda each: (each.is_gradient, -each.gain))


def _between(scope: Microscope, ops: list[Op]) -> list[Op]:
    own = {id(op) for op in ops}
    turns = [at for at, op in enumerate(scope.ops) if id(op) in own]
    return [op for op in scope.ops[turns[0] : turns[-1] + 1] if op.derived is ops[0].derived] if turns else []


def _growth(scope: Microscope, ops: list[Op], is_gradient: bool, least: float) -> Growth | None:
    sizes = [scope.magnitude(op.outputs[0]) for op in ops]
    end = next((at for at, size in enumerate(sizes) if not math.isfinite(size)), len(sizes))
    start = next((at for at, size in enumerate(sizes[:end]) if size > 0), end)
    finite = sizes[start:end]
    if len(finite) < _MIN_TURNS or 0 in finite:
        return None
    ratios = [after / before for before, after in itertools.pairwise(finite)]
    total = finite[-1] / finite[0]
    growing = sum(ratio > 1.0 for ratio in ratios) / len(ratios)
    if total < least or growing < _MIN_SHARE_GROWING or median(ratios) < _MIN_FACTOR:
        return None
    spot = scope.spot_of(ops[-1])
    assert spot is not None
    gains = [gain for op in ops[start:end] if (gain := _gain(scope, op)) is not None]
    factor = total ** (1 / len(ratios))
    is_by_weights = any(True for _ in _weights(scope, ops))
    gain = median(gains) if gains else 1.0
    first, last = finite[0], finite[-1]
    return Growth(spot, ops[-1].kind, len(finite), factor, first, last, is_gradient, (), gain, is_by_weights)


def _gain(scope: Microscope, op: Op) -> float | None:
    """How many times larger the result of an operation is than what it was given by the step."""
    given = [scope.magnitude(value) for value in op.inputs if not isinstance(scope.source(value), Leaf)]
    largest = max(given, default=0.0)
    return scope.magnitude(op.outputs[0]) / largest if largest > 0 else None


def _weights(scope: Microscope, ops: Iterable[Op]) -> Iterable[torch.Tensor]:
    """The matrices of weights that operations, or the forward operations behind gradients, are given."""
    seen: set[int] = set()
    for op in ops:
        for value in scope.forward_of(op).inputs:
            source = scope.source(value)
            if not isinstance(source, Leaf) or value.storage in seen or source.tensor.dim() <= 1:
                continue
            if source.tensor.requires_grad or isinstance(source.tensor, torch.nn.Parameter):  # of a teacher, say
                seen.add(value.storage)
                yield source.tensor
