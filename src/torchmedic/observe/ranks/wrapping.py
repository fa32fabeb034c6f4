"""What DistributedDataParallel does not average: what was frozen when it was made, and what the user averages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch


class Frozen:
    """The parameters that were frozen when their model was wrapped."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def wrapped(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """A model with these parameters is wrapped, perhaps not for the first time."""
        again = {id(each) for each in parameters.values()}
        frozen = [(name, weakref.ref(each)) for name, each in parameters.items() if not each.requires_grad]
        self._known = [pair for pair in self._known if id(pair[1]()) not in again] + frozen

    def thawed(self) -> tuple[str, torch.Tensor] | None:
        """The first of them that requires a gradient now."""
        alive = ((name, weight) for name, reference in self._known if (weight := reference()) is not None)
        return next((pair for pair in alive if pair[1].requires_grad and pair[1].numel()), None)


def may_train_apart(module: Any) -> bool:
    """Whether the ranks may differ on purpose: a hook of the user exchanges gradients, or `Join` lets a rank end first.

    After a `Join`, ranks with the same number of updates are at different places of the training.
    """
    joined = getattr(module, "_join_config", None)
    return bool(getattr(module, "_comm_hooks", None)) or bool(getattr(joined, "enable", False))
