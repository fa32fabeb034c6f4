"""How many elements a loss is the sum of, read from its graph."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch

_SUM = 2  # how ATen numbers the reductions of a loss
_MAX_NODES = 12
_MAX_TERMS = 4096
_MIN_TERMS = 8  # of one kind that are added up one by one


class Reduction(NamedTuple):
    """How a loss was made of its elements."""

    elements: float  # elements that were added up without being divided by their number; 1 for a mean
    is_loop: bool = False  # they were added one by one


def reduction_of(loss: torch.Tensor) -> Reduction:
    """The last reduction of a loss.

    Only factors that are plain numbers are followed: `(a - b).square().sum() / 64` counts as a 64th of its elements.
    """
    node: Any = loss.grad_fn
    factor = 1.0
    for _ in range(_MAX_NODES):
        if node is None:
            break
        name = _name(node)
        if name == "Sum":
            return Reduction(max(1.0, factor * math.prod(getattr(node, "_saved_self_sym_sizes", ()) or ())))
        if getattr(node, "_saved_reduction", None) == _SUM:
            given = getattr(node, "_saved_self", None)
            count = given.shape[0] if name.startswith("NllLoss") and given is not None else _numel(given)
            return Reduction(max(1.0, factor * count))
        if name == "Add" and (terms := _terms(node)) >= _MIN_TERMS:
            return Reduction(max(1.0, factor * terms), is_loop=True)
        if name == "Div":
            factor /= _scalar(getattr(node, "_saved_other", None))
        elif name == "Mul":
            factor *= _scalar(getattr(node, "_saved_other", None))
        elif name not in ("Neg", "Add", "Sub", "Squeeze", "View", "Clone"):
            break
        node = node.next_functions[0][0] if node.next_functions else None
    return Reduction(1.0)


def _terms(node: Any) -> int:
    """How many terms of the same kind a chain of additions has: `loss += criterion(...)` in a loop.

    A term with a factor of its own is of another kind: a loop that divides every term by their number takes the mean.
    """
    kinds: Counter[str] = Counter()
    waiting = [node]
    while waiting and len(waiting) + kinds.total() < _MAX_TERMS:
        node = waiting.pop()
        if _name(node) == "Add":
            waiting += [following for following, _ in node.next_functions if following is not None]
        else:
            kinds[_name(node)] += 1
    kinds.pop("Div", None)
    kinds.pop("Mul", None)
    return max(kinds.values(), default=0)


def _name(node: Any) -> str:
    return type(node).__name__.partition("Backward")[0]


def _numel(given: Any) -> int:
    return given.numel() if isinstance(given, torch.Tensor) else 1


def _scalar(value: Any) -> float:
    """A factor; 1 where it is not a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
        value = value.item()
    return abs(float(value)) or 1.0 if isinstance(value, int | float) else 1.0
