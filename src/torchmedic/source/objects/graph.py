"""The autograd graph behind tensors: its nodes, its leaves, and how far back in time it reaches.

Autograd numbers nodes as they are made, so the smallest number behind a tensor tells when the oldest part of its graph
was made.
"""

from __future__ import annotations

import heapq
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_MAX_NODES = 400_000
_MAX_NODES_FOR_AGE = 1500  # of one tensor
_LEAF_NUMBER = 1 << 62  # autograd numbers leaves as if they were the newest nodes
FREED = "backward through the graph a second time"


def name_of(node: Any) -> str:
    """The name of a node. A custom Function may keep a value of its own as `ctx.name`, which hides the method."""
    return str(type(node).name(node))


def following(node: Any) -> list[Any]:
    """The nodes that a node hands its gradients to."""
    return [after for after, _ in node.next_functions if after is not None]


def walk(
    nodes: Iterable[Any], seen: set[Any] | None = None, most: int = _MAX_NODES, *, nearest_first: bool = False
) -> Iterator[Any]:
    """Yield nodes and all nodes behind them, each once.

    Args:
        nodes: Where to begin. None stands for a tensor without a graph.
        seen: Nodes that are left out. Every node of the walk is added.
        most: The size of `seen` at which the walk stops.
        nearest_first: Whether to go in breadth; otherwise the walk goes in depth, which is faster.
    """
    seen = set() if seen is None else seen
    pending = deque(node for node in nodes if node is not None)
    take = pending.popleft if nearest_first else pending.pop
    while pending and len(seen) < most:
        node = take()
        if node not in seen:
            seen.add(node)
            yield node
            pending.extend(after for after, _ in node.next_functions if after is not None)


def nodes_behind(roots: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes of the graph behind some tensors, without the leaves."""
    return {node for node in walk(root.grad_fn for root in roots) if is_counted(node)}


def leaves_behind(roots: Iterable[Any], most: int = _MAX_NODES) -> list[torch.Tensor]:
    """The tensors that collect gradients in the graph behind some tensors."""
    nodes = walk((root.grad_fn for root in roots if isinstance(root, torch.Tensor)), most=most)
    return [leaf for node in nodes if isinstance(leaf := getattr(node, "variable", None), torch.Tensor)]


def is_counted(node: Any) -> bool:
    """Whether a node has a number of its own: all leaves have the highest number there is."""
    return not hasattr(node, "variable")


def node_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor; None for a leaf, and for views that torch cannot tell of."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False  # a view whose base was changed in place: torch does not even say that


def existing_node_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor; None also for a view of changed data, where the question would make a new node."""
    if not tensor.requires_grad or tensor.is_inference() or (tensor._is_view() and tensor._version):
        return None
    return tensor.grad_fn


def saved_by(node: Any, name: str) -> Any:
    """What a node has saved under a name; None where a hook has packed it: to read it would run the hook."""
    if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:  # torch 2.6 cannot say
        return None
    return getattr(node, f"_saved_{name}", None)


def packs_saved_tensors() -> bool:
    """Whether hooks for saved tensors are in force: `saved_tensors_hooks`, `save_on_cpu`, checkpoints.

    torch 2.6 cannot be asked; there only the frame of a checkpoint tells.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(True) is not None
    return any(
        frame.f_code.co_filename.endswith("torch/utils/checkpoint.py") for frame, _ in traceback.walk_stack(None)
    )


def is_freed(node: Any) -> bool:
    """Whether a backward has been through this node and has thrown away what the node had saved."""
    for name in ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))):
        try:
            getattr(node, name)
        except RuntimeError as error:
            if FREED in str(error):
                return True
        except AttributeError:
            continue
    return False


def oldest(node: Any, since: int, seen: set[Any]) -> tuple[int, int]:
    """The smallest number behind a node, as far as it is below `since`, and how many are; else a greater number.

    The oldest nodes are visited first: a loss that was added up over a thousand steps leads straight back to the first.

    Args:
        node: Where the graph begins.
        since: Nodes with a smaller number are old.
        seen: Nodes that lead to nothing old, so that later calls need not visit them again. Grows.
    """
    count = 0
    least = node._sequence_nr()
    heap = [(least, count, node)]
    visited = {node}
    old = 0
    while heap and len(visited) < _MAX_NODES_FOR_AGE:
        number, _, node = heapq.heappop(heap)
        least = min(least, number)
        old += number < since
        for after, _ in node.next_functions:
            if after is None or after in visited or after in seen:
                continue
            number = after._sequence_nr()
            if number < _LEAF_NUMBER:
                count += 1
                visited.add(after)
                heapq.heappush(heap, (number, count, after))
    if least >= since:
        seen |= visited
    return int(least), old
