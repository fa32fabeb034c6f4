"""Walks over an autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_LIMIT = 200_000
_FREED = "backward through the graph a second time"


def nodes_behind(roots: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes of the graph behind some tensors, leaves left out."""
    return {node for node in walk(root.grad_fn for root in roots) if not hasattr(node, "variable")}


def leaves_behind(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that collect gradients."""
    return [node.variable for node in walk(root.grad_fn for root in roots) if hasattr(node, "variable")]


def walk(nodes: Iterable[Any]) -> Iterator[Any]:
    """Nodes and all that lies behind them, each once."""
    pending = [node for node in nodes if node is not None]
    seen: set[Any] = set()
    while pending and len(seen) < _LIMIT:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(following for following, _ in node.next_functions if following is not None)


def is_freed(node: Any) -> bool:
    """Whether a backward has been through this node and has thrown away what it had saved."""
    for name in ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))):
        try:
            getattr(node, name)
        except RuntimeError as error:
            if _FREED in str(error):
                return True
        except AttributeError:
            continue
    return False
