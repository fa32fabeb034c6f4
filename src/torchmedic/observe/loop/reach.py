"""Which parameters the loss reaches, read off the graph before backward frees it. Asked of a few steps only."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchmedic.source.objects.graph import walk

_MAX_NODES = 20000  # of one graph


class Reached(NamedTuple):
    """A parameter that some loss reached, how often it had been written to then, and in which step that was."""

    reference: weakref.ref[torch.Tensor]
    writes: int
    step: int


class Reach:
    """Parameters by their identity."""

    def __init__(self) -> None:
        self.found: dict[int, Reached] = {}
        self.complete = True  # no graph was too large to be walked to its end
        self.walks = 0

    def walk(self, roots: Iterable[Any], step: int) -> None:
        self.walks += 1
        seen: set[Any] = set()
        for node in walk((root.grad_fn for root in roots if isinstance(root, torch.Tensor)), seen, _MAX_NODES):
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in self.found:
                self.found[id(leaf)] = Reached(weakref.ref(leaf), leaf._version, step)
        self.complete &= len(seen) < _MAX_NODES

    def living(self) -> list[tuple[torch.Tensor, Reached]]:
        """Parameters that were reached and still live."""
        known = ((reached.reference(), reached) for reached in self.found.values())
        return [(tensor, reached) for tensor, reached in known if tensor is not None]
