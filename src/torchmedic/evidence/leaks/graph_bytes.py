"""How many bytes one kept graph keeps alive, that another one beside it does not keep as well."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from torchmedic.evidence.memory.accounting.saved_by_graph import tensors_saved_by
from torchmedic.source.objects.graph import walk

_NODES = 5000  # of a graph that are asked


def own_bytes(roots: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> int:
    """Of what the nodes have saved for a backward. What weights and data take is saved by every graph, and left out."""
    shared = _saved(others)
    return sum(nbytes for storage, nbytes in _saved(roots).items() if storage not in shared)


def _saved(roots: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage."""
    found: dict[int, int] = {}
    for node in itertools.islice(walk(root.grad_fn for root in roots), _NODES):
        for tensor in tensors_saved_by(node):
            if tensor.layout is torch.strided and type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found
