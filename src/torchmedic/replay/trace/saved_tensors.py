"""Who saved a tensor for backward in a replay, and who wrote to it later.

Hooks on saved tensors switch off autograd's own check of versions, so the hooks check versions themselves.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.replay.trace.microscope import Microscope, Op, Spot, storage_of
from torchmedic.source.objects.graph import name_of
from torchmedic.source.spots import user_spots


class Saved(NamedTuple):
    """A tensor as it was when an operation saved it."""

    after: int  # how many operations had run by then
    spot: Spot | None
    storage: int | None
    version: int
    shape: tuple[int, ...]
    tensor: torch.Tensor


class Overwritten(RuntimeError):
    """Backward needs a saved tensor that is no longer what it was."""

    def __init__(self, saved: Saved, node: str) -> None:
        super().__init__("a saved tensor was modified in place")
        self.saved = saved
        self.node = node


@contextlib.contextmanager
def watch_saved_tensors(scope: Microscope) -> Iterator[None]:
    """Raise `Overwritten` where autograd would complain of a version, with the saver at hand."""

    def pack(tensor: torch.Tensor) -> Saved:
        # The stack is that of the call which is being recorded; the last operation may be an older one.
        spots = user_spots(sys._getframe(1))
        spot = spots[0] if spots else None
        return Saved(len(scope.ops), spot, storage_of(tensor), tensor._version, tuple(tensor.shape), tensor)

    def unpack(saved: Saved) -> torch.Tensor:
        if saved.tensor._version != saved.version:
            node: Any = torch._C._current_autograd_node()
            raise Overwritten(saved, name_of(node) if node is not None else "")
        return saved.tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def writers(scope: Microscope, saved: Saved) -> list[Op]:
    """The operations that wrote to a saved tensor's memory after it was saved, in order.

    An operation saves its inputs before it runs and its results after that, so one that writes to what it saves as an
    input counts.
    """
    return [op for op in scope.ops[saved.after :] if saved.storage is not None and saved.storage in op.written]
