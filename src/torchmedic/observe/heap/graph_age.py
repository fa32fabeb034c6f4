"""How far back in time an autograd graph reaches.

Nodes are numbered as they are made, so the smallest number behind a tensor tells when the oldest part of its graph was
made. The oldest are looked at first: a loss that was added up over a thousand steps leads straight back to the first.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch

_MOST = 1500  # nodes that are looked at for one tensor
_LEAF = 1 << 62  # leaves are numbered as if they were the newest


def node_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor; None also where only to ask would make a new one, as for a view of changed data."""
    if not tensor.requires_grad or tensor.is_inference() or (tensor._is_view() and tensor._version):
        return None
    return tensor.grad_fn


def oldest(node: Any, since: int, seen: set[Any]) -> tuple[int, int]:
    """The smallest sequence number behind a node, as far as it is below `since`, and how many are; else a greater one.

    Args:
        node: Where the graph begins.
        since: Older than this is old.
        seen: Nodes that lead to nothing old, and that later calls need not visit again. Grows.
    """
    count = 0
    least = node._sequence_nr()
    heap = [(least, count, node)]
    visited = {node}
    old = 0
    while heap and len(visited) < _MOST:
        number, _, node = heapq.heappop(heap)
        least = min(least, number)
        old += number < since
        for following, _ in node.next_functions:
            if following is None or following in visited or following in seen:
                continue
            number = following._sequence_nr()
            if number < _LEAF:
                count += 1
                visited.add(following)
                heapq.heappush(heap, (number, count, following))
    if least >= since:
        seen |= visited
    return int(least), old
