"""Which names of the user's hold tensors that lie in shared memory: batches that were kept stay there."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.evidence.memory.accounting.walk import held_tensors


class SharedHolding(NamedTuple):
    """A name, and what it leads to in shared memory."""

    holder: Holder
    nbytes: int
    tensors: int


def shared_holdings(frames: Iterable[FrameType]) -> list[SharedHolding]:
    """The biggest first; a storage counts for the first name that leads to it.

    Args:
        frames: Those that the exception came through, innermost first.
    """
    found: dict[str, SharedHolding] = {}
    seen: set[int] = set()
    for tensor, holder in held_tensors(frames):
        if tensor.device.type != "cpu" or tensor.is_sparse or not tensor.is_shared():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        known = found.get(holder.path, SharedHolding(holder, 0, 0))
        found[holder.path] = SharedHolding(known.holder, known.nbytes + storage.nbytes(), known.tensors + 1)
    return sorted(found.values(), key=lambda each: -each.nbytes)
