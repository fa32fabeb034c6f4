"""What DistributedDataParallel does not average: what was frozen when it was made, and what the user averages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch


class Frozen:
    """The parameters that were frozen when their model was wrapped."""

    __slots__ = ("_known", "_versions")

    def __init__(self) -> None:
        self._known: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._versions: dict[int, int] = {}  # by identity, as they were first looked at

    def wrapped(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """A model with these parameters is wrapped, perhaps not for the first time."""
        again = {id(each) for each in parameters.values()}
        frozen = [(name, weakref.ref(each)) for name, each in parameters.items() if not each.requires_grad]
        self._known = [pair for pair in self._known if id(pair[1]()) not in again] + frozen

    def changed(self) -> tuple[str, torch.Tensor, str] | None:
        """The first of them that requires a gradient now (`thawed`), else that somebody has `written` to."""
        alive = [(name, weight) for name, reference in self._known if (weight := reference()) is not None]
        alive = [pair for pair in alive if pair[1].numel() and pair[1].is_floating_point()]
        thawed = next((pair for pair in alive if pair[1].requires_grad), None)
        if thawed is not None:
            return *thawed, "thawed"
        written = (
            pair for pair in alive if self._versions.setdefault(id(pair[1]), pair[1]._version) != pair[1]._version
        )
        found = [*written]  # all of them are looked at
        return (*found[0], "written") if found else None


def may_train_apart(module: Any) -> bool:
    """Whether the ranks may differ on purpose: a hook of the user exchanges gradients, or `Join` lets a rank end first.

    After a `Join`, ranks with the same number of updates are at different places of the training.
    """
    joined = getattr(module, "_join_config", None)
    return bool(getattr(module, "_comm_hooks", None)) or bool(getattr(joined, "enable", False))
