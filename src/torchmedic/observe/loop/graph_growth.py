"""Whether the graph of the loss reaches back into earlier steps, further and further, and through which variable.

Autograd numbers nodes as they are made, so a node that was there before the last update is known by its number. Two
steps are looked at. Only where these show such nodes are there more looks, and a walk over the user's variables after
each step, to tell which of them carries the old graph over.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from torchmedic.observe.heap.walk import Held, Walk
from torchmedic.source.objects.graph import following, is_counted, walk
from torchmedic.source.spots import NOWHERE, Place

_FIRST_STEPS = (2, 3)
_LATER_STEPS = frozenset({4, 5, 6, 8, 11, 16, 22})
_MAX_NODES = 20_000


class GraphGrowth:
    """Fed by the ledger."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int]] = []  # step, nodes of earlier steps, nodes
        self.carried: Held | None = None
        self.backward: Place = NOWHERE
        self.over = False
        self._bound = 0  # nodes with a smaller number were made before the last update
        self._holders: dict[int, Held] = {}  # of tensors after the last step, by the number of their node

    def step_ended(self, frame: FrameType) -> None:
        self._bound = int(_get_sequence_nr())
        self._holders = {}
        if self.sizes and not self.over:
            Walk(0, {}, lambda _: None, graphs=self._holders).run(frame)

    def backward_begins(self, roots: Iterable[Any], step: int, place: Place) -> None:
        if self.over or step not in (*_FIRST_STEPS, *_LATER_STEPS) or (self.sizes and self.sizes[-1][0] == step):
            return
        if step in _LATER_STEPS and not self.sizes:
            self.over = True
            return
        old, count, handed_over = self._count(roots)
        before = self.sizes[-1][1] if self.sizes else 0
        self.over = bool(self.sizes) and (old <= before or step == max(_LATER_STEPS))
        if old <= before:
            self.sizes.clear()  # it is cut now and then, or stays as it is
            return
        self.sizes.append((step, old, count))
        self.backward = place
        for number in handed_over:
            self.carried = self._holders.get(number, self.carried)

    def _count(self, roots: Iterable[Any]) -> tuple[int, int, list[int]]:
        """Nodes of earlier steps, all nodes, and the numbers of old nodes that new ones lead to."""
        old = 0
        handed_over: list[int] = []
        seen: set[Any] = set()
        for node in walk((root.grad_fn for root in roots if isinstance(root, torch.Tensor)), seen, _MAX_NODES):
            if self._is_old(node):
                old += 1
            else:
                handed_over += [int(after._sequence_nr()) for after in following(node) if self._is_old(after)]
        return old, len(seen), handed_over

    def _is_old(self, node: Any) -> bool:
        return is_counted(node) and int(node._sequence_nr()) < self._bound
