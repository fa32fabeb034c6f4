"""What a collective is called, and what a rank sends in it: shapes, dtypes, members, the parts for each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmedic.records.ranks import WRAPPED

# The methods of ProcessGroup, by what the functions of torch.distributed call them.
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_any",
}
# Methods whose first argument is what they receive; what they send is the second.
SENT_SECOND = frozenset({"all_gather", "all_gather_single", "gather", "all_to_all", "reduce_scatter_single"})


def contents(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Any, size: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """The shapes and dtypes of the tensors that a rank sends; of a new group, its members; of a model, its buffers.

    Of `all_to_all`, how many elements the rank sends to each of the `size` ranks, and how many it takes from each.
    """
    if op == "new_group":
        members = args[0] if args else kwargs.get("ranks")
        if members is None:
            members = range(torch.distributed.get_world_size())
        return ((tuple(sorted(members)),) if hasattr(members, "__len__") else ()), ()  # an iterator is for torch
    found = [each for each in tensors or () if isinstance(each, Tensor)]
    if op == WRAPPED:
        buffers: list[Tensor] = kwargs.get("buffers", [])
        shapes: tuple[tuple[int, ...], ...] = ((len(buffers), sum(each.numel() for each in buffers)),)
    else:
        shapes = tuple(tuple(each.shape) for each in found)
    if op == "all_to_all" and len(args) > 1:
        splits = args[2:4] if isinstance(args[0], Tensor) and len(args) > 3 else ((), ())
        shapes = _parts(args[1], splits[1], size), _parts(args[0], splits[0], size)
    return shapes, tuple(str(each.dtype)[6:] for each in found)


def is_into_one(op: str, args: tuple[Any, ...]) -> bool:
    """Whether the parts of all ranks are to be written into one and the same tensor: `[out] * world_size`."""
    into = args[0][0] if op in ("all_gather", "gather") and args and args[0] else ()
    return isinstance(into, list) and len(into) > 1 and all(each is into[0] for each in into) and into[0].numel() > 0


def _parts(tensors: Any, splits: Any, size: int) -> tuple[int, ...]:
    """How many elements go to each rank, or come from it. `splits` are in rows; without them all parts are alike."""
    if not isinstance(tensors, Tensor):
        return tuple(each.numel() for each in tensors)
    if not splits:
        return (tensors.numel() // max(1, size),) * size
    row = tensors.numel() // max(1, len(tensors))
    return tuple(row * each for each in splits)
