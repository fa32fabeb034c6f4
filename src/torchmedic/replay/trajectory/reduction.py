"""How many elements a loss is the sum of, read from its graph."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch

from torchmedic.replay.trajectory.terms import name_of, scalar

_SUM = 2  # how ATen numbers the reductions of a loss
_MAX_NODES = 12
_MAX_TERMS = 4096
_MIN_TERMS = 8  # terms of one kind that are added up one by one


class Reduction(NamedTuple):
    """How a loss was made of its elements."""

    elements: float  # elements that were added up without being divided by their number; 1 for a mean
    node: Any = None  # of the graph, that adds them up
    factor: float = 1.0  # the plain numbers that the loss was multiplied by, as `loss / 8`


def reduction_of(loss: torch.Tensor) -> Reduction:
    """The last reduction of a loss.

    Only factors that are plain numbers are followed: `(a - b).square().sum() / 64` counts as a 64th of its elements.
    Terms that a loop adds up count with the elements of each.
    """
    node: Any = loss.grad_fn
    added: Any = None  # the last addition of a loop
    terms = 1  # of a loop
    factor = 1.0
    for _ in range(_MAX_NODES):
        if node is None:
            break
        name = name_of(node)
        if name == "Sum":
            count = math.prod(getattr(node, "_saved_self_sym_sizes", ()) or ())
            return Reduction(max(1.0, factor * terms * count), added or node, factor)
        if getattr(node, "_saved_reduction", None) == _SUM:
            given = getattr(node, "_saved_self", None)
            count = given.shape[0] if name.startswith("NllLoss") and given is not None else _numel(given)
            return Reduction(max(1.0, factor * terms * count), added or node, factor)
        if name == "Add" and added is None and (found := _terms(node))[0] >= _MIN_TERMS:
            added = node
            terms, node = found
            continue
        if name == "Div":
            factor /= scalar(getattr(node, "_saved_other", None))
        elif name == "Mul":
            factor *= scalar(getattr(node, "_saved_other", None))
        elif name not in ("Neg", "Add", "Sub", "Squeeze", "View", "Clone"):
            break
        node = node.next_functions[0][0] if node.next_functions else None
    return Reduction(max(1.0, factor * terms) if added is not None else 1.0, added, factor)


def _terms(node: Any) -> tuple[int, Any]:
    """How many terms of the same kind a chain of additions has, and one of them: `loss += criterion(...)` in a loop.

    A term with a factor of its own is of another kind: a loop that divides every term by their number takes the mean.
    """
    kinds: Counter[str] = Counter()
    examples: dict[str, Any] = {}
    waiting = [node]
    while waiting and len(waiting) + kinds.total() < _MAX_TERMS:
        node = waiting.pop()
        name = name_of(node)
        if name == "Add":
            waiting += [following for following, _ in node.next_functions if following is not None]
        elif name not in ("Div", "Mul"):
            kinds[name] += 1
            examples.setdefault(name, node)
    if not kinds:
        return 0, None
    (kind, count), *_ = kinds.most_common(1)
    return count, examples[kind]


def _numel(given: Any) -> int:
    return given.numel() if isinstance(given, torch.Tensor) else 1
