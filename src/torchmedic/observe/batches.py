"""The batch that is being trained on, and which items of the dataset it was made of."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

# Above this the batch is held weakly: looking on must not keep a big one alive.
_STRONG_LIMIT = 64 * 1024 * 1024


class Batches:
    """References to the last batch that a DataLoader yielded, with its dataset indices."""

    def __init__(self) -> None:
        self._pending: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        self._strong: Any = None
        self._weak: list[weakref.ref[torch.Tensor]] = []
        self.indices: Any = None
        self.number = -1

    def index_drawn(self, iterator: Any, index: Any) -> None:
        """The sampler gave the indices of a coming batch; with workers, several are under way."""
        if not getattr(iterator, "_in_order", True):
            return  # batches may overtake each other, so the order of drawing says nothing
        self._pending.setdefault(iterator, deque()).append(index)

    def requested(self, iterator: Any) -> None:
        """The user asked for the next batch: the last one is no longer ours to hold."""
        self._strong = None
        self._weak = []
        self.indices = None

    def taken(self, iterator: Any) -> None:
        """A batch has come back, or failed to: name its indices."""
        pending = self._pending.get(iterator)
        self.indices = pending.popleft() if pending else None

    def arrived(self, batch: Any) -> None:
        self.number += 1
        tensors = list(tensors_in(batch))
        if sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided) <= _STRONG_LIMIT:
            self._strong = batch
        else:
            self._weak = [weakref.ref(tensor) for tensor in tensors]

    @property
    def whole(self) -> Any:
        """The last batch as it was yielded; None where it was too big to hold."""
        return self._strong

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the last batch that are still alive, in order."""
        if self._strong is not None:
            return list(tensors_in(self._strong))
        return [tensor for reference in self._weak if (tensor := reference()) is not None]


def tensors_in(value: Any, depth: int = 4) -> list[torch.Tensor]:
    """Every tensor of a nested batch, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0:
        return []
    if isinstance(value, dict) or hasattr(value, "items"):
        try:
            value = list(value.values())
        except Exception:
            return []
    if isinstance(value, list | tuple):
        return [tensor for item in value[:256] for tensor in tensors_in(item, depth - 1)]
    return []
