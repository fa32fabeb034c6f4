"""The memory behind tensors, each piece counted once: views, tied weights and aliases share a storage.

Nothing here asks a device for anything: sizes and identities are kept on the host, also when the device is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchmedic.source.objects.living import living


class Memory(NamedTuple):
    """One storage. Its key is its own for as long as the storage lives."""

    key: int
    nbytes: int
    device: torch.device
    address: int = 0  # on a card


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that Python knows of. What only C++ holds is found through the graph."""
    return [each for each in living(torch.Tensor) if not issubclass(type(each), FakeTensor)]


def memory_of(tensor: torch.Tensor) -> list[Memory]:
    """The storages behind a tensor: one, or those that a sparse tensor or a wrapper subclass is made of."""
    found = []
    for part in _parts(tensor, 3):
        try:
            storage = part.untyped_storage()
            size = storage.nbytes()
            if size:
                address = int(storage.data_ptr()) if part.device.type == "cuda" else 0
                found.append(Memory(int(storage._cdata), size, part.device, address))
        except (NotImplementedError, RuntimeError, ValueError):
            continue  # lazy parameters, wrappers without memory of their own
    return found


def memory_address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor of the host begins; 0 where it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else 0
    except (NotImplementedError, RuntimeError, ValueError):
        return 0


def distinct(tensors: Iterable[torch.Tensor]) -> dict[int, Memory]:
    """The storages of many tensors by their keys."""
    return {memory.key: memory for tensor in tensors for memory in memory_of(tensor)}


def total(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of many tensors, what they share counted once."""
    return sum(memory.nbytes for memory in distinct(tensors).values())


def _parts(tensor: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
        return
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return
    flatten: Any = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or depth == 0:
        yield tensor
        return
    names, _ = flatten(tensor)
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from _parts(inner, depth - 1)
