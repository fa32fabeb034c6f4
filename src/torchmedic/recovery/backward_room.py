"""Room that is made before a backward pass begins: half a backward pass cannot be repeated, as it frees its graph.

What a backward pass needs beside its graph follows from the graph: at each node, gradients as large as the tensors that
were saved there, less what the nodes before it have freed. Where the free memory is less, those saved tensors are
parked that the pass needs last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from torchmedic.recovery.cross_entropy import CrossEntropyInParts
from torchmedic.recovery.room import UNUSABLE_SHARE, RoomMaker, in_use_and_limit
from torchmedic.recovery.saved_tensors import SavedTensors
from torchmedic.source.objects.graph import walk

_GRADIENTS_OF_LARGEST = 2.2  # gradients of the two largest tensors, before and after a node, and some room to work in
_NEAR_STORAGES = 6  # that nodes have saved one after the other: the largest of them are those of a node
_MAX_FREE_SHARE = 0.5  # share of what is allowed: with more than that free, nobody looks at the graph


class BackwardRoom:
    """Knows with how much memory in use a backward pass has succeeded."""

    def __init__(self, room: RoomMaker, saved: SavedTensors, in_parts: CrossEntropyInParts) -> None:
        self._room = room
        self._saved = saved
        self._in_parts = in_parts
        self._proven_bytes = 0
        self._in_use = 0
        self.spare = 0  # bytes that the next pass has beside what it needs
        self.missing = 0  # bytes that could not be parked

    def make(self, roots: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> int:
        """Park what may be missing; returns the bytes that were parked."""
        roots = list(roots)
        self.missing = self.spare = 0
        found = in_use_and_limit(roots[0].device)
        if found is None:
            return 0
        self._in_use, limit = found
        free = limit - self._in_use
        if free > _MAX_FREE_SHARE * limit:
            self.spare = free // 2
            return 0
        if self._in_use <= self._proven_bytes:
            return 0
        needed = self._needed(walk(root.grad_fn for root in roots))
        gradients = max((each.nbytes for each in parameters if each.requires_grad and each.grad is None), default=0)
        missing = needed + int(UNUSABLE_SHARE * limit) + gradients - free
        missing += self._in_parts.backward_bytes()
        parked = self._room.park_saved(missing) if missing > 0 else 0
        self._in_use -= parked
        self.spare = max(parked - missing, 0)
        self.missing = max(missing - parked, 0)
        return parked

    def _needed(self, nodes: Iterable[Any]) -> int:
        """The bytes that the pass needs beside what is in memory now, where it needs most."""
        saved = sorted(set(self._saved.storages(nodes)), reverse=True)  # in the order of the pass
        last = {key: number for number, key, _, _ in saved}
        brought_back: set[int] = set()
        near: deque[int] = deque(maxlen=_NEAR_STORAGES)
        most = freed = 0
        for number, key, nbytes, is_in_memory in saved:
            near.append(nbytes)
            if not is_in_memory and key not in brought_back:
                brought_back.add(key)
                freed -= nbytes
            most = max(most, int(_GRADIENTS_OF_LARGEST * sum(sorted(near)[-2:])) - freed)
            if last[key] == number:
                freed += nbytes
        return most

    def succeeded(self) -> None:
        """The pass is over, and memory was enough."""
        self._proven_bytes = max(self._proven_bytes, self._in_use)

    def failed(self) -> None:
        """Memory was not enough with this much in use."""
        self._proven_bytes = 0
