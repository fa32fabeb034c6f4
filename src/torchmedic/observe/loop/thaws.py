"""Parameters that are frozen at first, are thawed later, and are in no optimizer then."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch


class Thawed(NamedTuple):
    """A parameter that requires a gradient since some look, and how often it had been written to then."""

    reference: weakref.ref[torch.Tensor]
    writes: int
    step: int


class Thaws:
    """Looks at the parameters of the models of a loop now and then."""

    def __init__(self) -> None:
        self.looked_at = 0  # the step of the last look
        self._frozen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._thawed: dict[int, Thawed] = {}

    def look(self, parameters: Iterable[torch.Tensor], owned: set[int], step: int) -> bool:
        """Look again; whether there are parameters without an optimizer that were thawed before the last look."""
        self.looked_at = step
        is_due = bool(self._thawed)
        for tensor in parameters:
            key = id(tensor)
            if not tensor.requires_grad:
                self._frozen[key] = weakref.ref(tensor)
            elif tensor.grad is not None and key in self._frozen and self._frozen[key]() is tensor and key not in owned:
                self._thawed.setdefault(key, Thawed(weakref.ref(tensor), tensor._version, step))
        return is_due and bool(self.idle(owned))

    def idle(self, owned: set[int]) -> list[tuple[torch.Tensor, Thawed]]:
        """The parameters that have a gradient and no optimizer, and have kept their values since they were thawed."""
        known = [(tensor, each) for each in self._thawed.values() if (tensor := each.reference()) is not None]
        return [
            (tensor, each)
            for tensor, each in known
            if id(tensor) not in owned
            and tensor.requires_grad
            and tensor.grad is not None
            and tensor._version == each.writes
        ]
