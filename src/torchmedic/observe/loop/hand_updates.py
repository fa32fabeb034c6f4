"""The gradients of a loop that updates its weights by hand: whether anything clears them between two updates.

Two weights are looked at, as a witness of an optimizer is. Values of a device are not read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from torchmedic.observe.loop.witness import State, Witness
from torchmedic.source.objects.graph import walk
from torchmedic.source.spots import NOWHERE, Place

_MAX_SAMPLE = 32  # values of a weight
_MAX_NODES = 2000
_MAX_LOOKS = 24


class HandUpdates:
    """Fed by the ledger while no optimizer exists."""

    def __init__(self) -> None:
        self.norms: list[float] = []  # before backward, of gradients that the update before has used
        self.backward: Place = NOWHERE
        self._witness: Witness | None = None
        self._weight: weakref.ref[torch.Tensor] | None = None
        self._left: tuple[State, list[float]] | None = None  # after the last backward
        self._looks = 0

    def backward_begins(self, roots: Iterable[Any], place: Place) -> None:
        if self._looks >= _MAX_LOOKS:
            return
        self._looks += 1
        left, self.backward = self._left, place
        if self._witness is None:
            self._find(roots)
        elif left is not None and not self._is_stale(left):
            norm = self._witness.norm(wait=False)
            self.norms = [*self.norms, norm] if norm else []
        else:
            self.norms = []

    def backward_ended(self) -> None:
        values = self._values()
        self._left = (self._witness.look(), values) if self._witness is not None and values else None

    def _is_stale(self, left: tuple[State, list[float]]) -> bool:
        """Whether somebody has touched the gradients since the last backward, or nobody has moved the weights."""
        assert self._witness is not None
        return self._witness.look()[:2] != left[0][:2] or self._values() == left[1]

    def _find(self, roots: Iterable[Any]) -> None:
        """Take the weights that have gradients from the backward before."""
        starts = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
        leaves = [getattr(node, "variable", None) for node in walk(starts, most=_MAX_NODES)]
        held = [leaf for leaf in leaves if leaf is not None and leaf.grad is not None and leaf.is_cpu]
        if held:
            self._witness = Witness(*dict.fromkeys((held[0], held[-1])))
            self._weight = weakref.ref(held[0])

    def _values(self) -> list[float]:
        """A sample of a weight: writing through `.data` leaves no other trace."""
        tensor = self._weight() if self._weight is not None else None
        if tensor is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return []
        values: list[float] = tensor.detach().flatten()[:_MAX_SAMPLE].tolist()
        return values
