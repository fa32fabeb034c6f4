"""What a graph tells of the numbers in it: their precision, the data that went in, and the loss of knowing nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node

# What a first layer was given, if that is no part of the graph: the saved tensor, and where it stands among the inputs.
_GIVEN = {"AddmmBackward": ("_saved_mat1", 1), "ConvolutionBackward": ("_saved_input", 0)}
_FACTOR = 4.0  # of the loss of knowing nothing
_BIG = 1 << 26  # elements of a tensor that is not looked at
# These change the precision only if they are told to, or are the user's own.
_ON_PURPOSE = (
    "ToCopy",
    "Mean",
    "Sum",
    "Prod",
    "Cumsum",
    "Cumprod",
    "Softmax",
    "LogSoftmax",
    "LinalgVectorNorm",
    "Norm",
)


def loss_of_knowing_nothing(root: torch.Tensor, classes: int) -> float | None:
    """What a loss that is nothing but a mean cross entropy is if all classes are equally likely; else None.

    That is so whatever the targets are, with weights of classes and with labels that are ignored.
    """
    node: Any = root.grad_fn
    kind = node.name().rstrip("0123456789") if node is not None else ""
    if kind in ("NllLossBackward", "NllLoss2DBackward", "NllLoss"):
        return math.log(classes) if node._saved_reduction == 1 and classes > 1 else None
    if kind == "BinaryCrossEntropyWithLogitsBackward":
        plain = node._saved_reduction == 1 and node._saved_pos_weight is None and node._saved_weight is None
        return math.log(2) if plain else None
    return None


def largest_given(kind: str, raw: Any) -> torch.Tensor | None:
    """The largest value of the data that a first layer was given; stays on its device."""
    name, position = _GIVEN.get(kind, ("", 0))
    if not name or raw.next_functions[position][0] is not None:
        return None
    given: Any = getattr(raw, name)
    if type(given) is not torch.Tensor or not 0 < given.numel() <= _BIG or given.is_meta or given.is_complex():
        return None
    found: torch.Tensor = torch.maximum(given.detach().amax(), -given.detach().amin())
    return found


def is_too_high(graph: LossGraph) -> bool:
    """Whether a first loss is far worse than knowing nothing would be."""
    expected, values = graph.untrained, [root.value for root in graph.roots]
    return expected is not None and isinstance(values[0], float) and values[0] > max(_FACTOR * expected, expected + 3)


def promotions(graph: LossGraph) -> list[Node]:
    """The nodes at which a graph of smaller precision becomes one of float64, by something that is not part of it."""
    if any(node.leaf is not None and node.dtype is torch.float64 for node in graph.nodes):
        return []
    found: list[Node] = []
    for node in graph.nodes:
        if node.dtype is not torch.float64 or not node.behind:
            continue
        behind = [graph.nodes[number].dtype for number in node.behind]
        if torch.float64 in behind or not any(
            dtype in (torch.float32, torch.float16, torch.bfloat16) for dtype in behind
        ):
            continue
        if node.kind.startswith(_ON_PURPOSE) or not node.kind.endswith("Backward"):
            return []
        found.append(node)
    return found


def share_in_double(nodes: Sequence[Node]) -> tuple[int, int]:
    """Values that were computed in float64, and all."""
    sizes = [(node.dtype, math.prod(node.shape)) for node in nodes if node.shape is not None and node.leaf is None]
    return sum(size for dtype, size in sizes if dtype is torch.float64), sum(size for _, size in sizes)
