"""Targets of a loss function that no output of the model can be equal to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node
    from torchmedic.observe.checkup.node_births import LossCall

PAIRED = frozenset("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits".split())
BINARY = ("binary_cross_entropy_with_logits", "binary_cross_entropy")
_RANGES = {
    "ReluBackward": (0.0, float("inf")),
    "SigmoidBackward": (0.0, 1.0),
    "SoftmaxBackward": (0.0, 1.0),
    "TanhBackward": (-1.0, 1.0),
}
_MAX_ELEMENTS = 1 << 26  # of a target
_MIN_SHARE_OF_VARIANCE = 0.1  # of targets: what is out of reach


def outside(graph: LossGraph) -> dict[int, tuple[Any, int]]:
    """How many targets are out of range, and of how many, by the identity of the loss call.

    The first number is a tensor of one element until it is read.
    """
    found = {}
    for call in graph.losses():
        target = call.target()
        bounds = _bounds(call, graph.value_of(graph.made(call.sequence)))
        if target is None or bounds is None:
            continue
        if not target.is_floating_point() or not 0 < target.numel() <= _MAX_ELEMENTS or target.is_meta:
            continue
        found[id(call)] = (_count_outside(target, *bounds), target.numel())
    return found


def _bounds(call: LossCall, node: Node | None) -> tuple[float, float] | None:
    """What the targets of a loss may be, by its definition or by the activation that a model ends in."""
    if call.name in BINARY:
        if call.name == BINARY[0] and node is not None and node.kind == "ReluBackward":
            return 0.5, 1.0  # the probability of the lowest score that is left
        return -0.5, 1.5  # 0.7 to 1.2 is usual in a GAN
    return _RANGES.get(node.kind) if node is not None and call.name in PAIRED else None


def _count_outside(target: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """How many targets are outside of a range; 0 where that is a small part of their variance, such as noise."""
    margin = 0.02 * (high - low) if high - low < float("inf") else 0.02 * target.abs().amax()
    missed = torch.maximum(low - target, target - high).clamp_min(0).float()
    spread = (target - target.mean()).float()
    is_much = missed.square().sum() > _MIN_SHARE_OF_VARIANCE * spread.square().sum()
    count: torch.Tensor = (missed > margin).sum()
    return count * is_much
