"""Room that is made before a backward pass begins: half a backward pass cannot be repeated, as it frees its graph.

What a backward pass needs beside its graph follows from the graph: gradients as large as its largest tensors. Where the
free memory is less, saved tensors are parked that the pass needs last.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchmedic.recovery.cross_entropy import CrossEntropyInParts
from torchmedic.recovery.room import UNUSABLE_SHARE, RoomMaker, in_use_and_limit
from torchmedic.recovery.saved_tensors import SavedTensors
from torchmedic.source.objects.graph import walk

_GRADIENTS_OF_LARGEST = 2.2  # gradients of the two largest tensors, before and after a node, and some room to work in
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
        largest = sum(self._saved.sizes(walk(root.grad_fn for root in roots))[-2:])
        gradients = max((each.nbytes for each in parameters if each.requires_grad and each.grad is None), default=0)
        missing = int(_GRADIENTS_OF_LARGEST * largest + UNUSABLE_SHARE * limit) + gradients - free
        missing += self._in_parts.backward_bytes()
        parked = self._room.park_saved(missing) if missing > 0 else 0
        self._in_use -= parked
        self.spare = max(parked - missing, 0)
        self.missing = max(missing - parked, 0)
        return parked

    def succeeded(self) -> None:
        """The pass is over, and memory was enough."""
        self._proven_bytes = max(self._proven_bytes, self._in_use)

    def failed(self) -> None:
        """Memory was not enough with this much in use."""
        self._proven_bytes = 0
