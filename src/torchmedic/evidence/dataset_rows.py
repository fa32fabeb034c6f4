"""Which item of the dataset an element of a tensor stands for.

The rows of a batch are the items that its sampler drew, in order. An element of another tensor is traced back to a row
only if the values of the batch bear it out: a target that was flattened, shifted or moved, or the batch itself.
"""

from __future__ import annotations

from typing import Any

import torch

from torchmedic.detect.failures.exceptions import Raised
from torchmedic.replay.trace.values import is_whole, readable


def items_of(incident: Raised, tensor: torch.Tensor, positions: list[tuple[int, ...]]) -> list[Any]:
    """The dataset index of each position; empty where it cannot be proven."""
    indices = incident.batch_indices
    if len(indices) == 1 and isinstance(indices[0], list | tuple):
        indices = tuple(indices[0])
    if not indices or all(index is None for index in indices) or not positions:
        return []
    for member in incident.batch:
        rows = _rows(member, tensor, positions, len(indices))
        if rows is not None:
            return list(dict.fromkeys(indices[row] for row in rows))
    return []


def _rows(member: Any, tensor: torch.Tensor, positions: list[tuple[int, ...]], length: int) -> list[int] | None:
    """The rows of one tensor of the batch that hold these elements, if it is where they came from."""
    batch = readable(member)
    if batch is None or batch.dim() == 0 or batch.shape[0] != length or tensor.numel() == 0:
        return None
    if batch.numel() == tensor.numel() and _same(batch, tensor):
        per_row = batch.numel() // length
        return [_flat(position, tensor.shape) // per_row for position in positions]
    # A slice of the batch (`tokens[:, 1:]`), flattened or not: the value must stand in exactly the rows named.
    if not (is_whole(batch) and is_whole(tensor)):
        return None
    wanted = {tensor[position].item() for position in positions}
    holding = [row for row in range(length) if wanted & set(batch[row].flatten().tolist())] if length <= 1024 else []
    return holding if len(holding) == 1 else None


def _same(batch: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Equal element by element, or by the same amount apart (labels from which 1 was taken)."""
    difference = tensor.flatten().double() - batch.flatten().double()
    return bool((difference == difference[0]).all())


def _flat(position: tuple[int, ...], shape: torch.Size) -> int:
    flat = 0
    for index, size in zip(position, shape, strict=True):
        flat = flat * size + index
    return flat
