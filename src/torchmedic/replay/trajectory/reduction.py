"""How many elements a loss is the sum of, read from its graph."""

from __future__ import annotations

import math
from typing import Any

import torch

_SUM = 2  # how ATen numbers the reductions of a loss
_MAX_NODES = 12


def summed_elements(loss: torch.Tensor) -> float:
    """The number of elements that were added up without being divided by their number; 1 for a mean.

    Only factors that are plain numbers are followed: `(a - b).square().sum() / 64` counts as a 64th of its elements.
    """
    node: Any = loss.grad_fn
    factor = 1.0
    for _ in range(_MAX_NODES):
        if node is None:
            return 1.0
        name = type(node).__name__.partition("Backward")[0]
        if name == "Sum":
            return max(1.0, factor * math.prod(getattr(node, "_saved_self_sym_sizes", ()) or ()))
        if getattr(node, "_saved_reduction", None) == _SUM:
            given = getattr(node, "_saved_self", None)
            count = given.shape[0] if name.startswith("NllLoss") and given is not None else _numel(given)
            return max(1.0, factor * count)
        if name == "Div":
            factor /= _scalar(getattr(node, "_saved_other", None))
        elif name == "Mul":
            factor *= _scalar(getattr(node, "_saved_other", None))
        elif name not in ("Neg", "Add", "Sub", "Squeeze", "View", "Clone"):
            return 1.0
        node = node.next_functions[0][0] if node.next_functions else None
    return 1.0


def _numel(given: Any) -> int:
    return given.numel() if isinstance(given, torch.Tensor) else 1


def _scalar(value: Any) -> float:
    """A factor; 1 where it is not a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
        value = value.item()
    return abs(float(value)) or 1.0 if isinstance(value, int | float) else 1.0
