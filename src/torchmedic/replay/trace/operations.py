"""What is recorded of the operations of a replay."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from torchmedic.source.spots import Spot

_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})


class Value(NamedTuple):
    """A tensor as one operation read it or left it."""

    storage: int  # 0 where it has none
    geometry: tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides
    magnitude: int  # into Microscope.values; -1 where it was not measured
    writes: int  # how often the memory had been written to until then


class Leaf(NamedTuple):
    """A tensor that the step found there: a parameter, a batch, a constant."""

    tensor: torch.Tensor
    reader: int  # the first operation that was given it


class Op:
    """One operation."""

    __slots__ = (
        "captured",
        "derived",
        "explicit",
        "forward",
        "index",
        "inputs",
        "module",
        "name",
        "node",
        "outputs",
        "spot",
        "writes",
        "written",
    )

    def __init__(self, index: int, name: str, spot: Spot | None, node: str) -> None:
        self.index = index
        self.name = name
        self.spot = spot
        self.node = node  # the autograd node that ran it; empty in the forward pass
        self.derived = False  # run by autograd, not written down by the user in a `backward` or a hook
        self.forward: int | None = None  # for a derived operation: the forward one that it differentiates
        self.inputs: list[Value] = []  # in the order of the tensors among its arguments
        self.outputs: list[Value] = []
        self.explicit = False  # a non-finite constant was among its arguments
        self.writes = False
        self.written: tuple[int, ...] = ()  # storages
        self.module: torch.nn.Module | None = None  # for a write: the layer of torch's that made it
        self.captured: Captured | None = None

    @property
    def is_backward(self) -> bool:
        return bool(self.node)

    @property
    def kind(self) -> str:
        """The name without the underscores that tell its variants apart: `_softmax`, `div_` -> `softmax`, `div`."""
        return self.name.strip("_")

    @property
    def is_uninitialised(self) -> bool:
        return self.name in _UNINITIALISED


class Captured(NamedTuple):
    """An operation with its values, kept in the second pass."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in the order of `Op.inputs`."""
        return [value for value in tree_iter((self.args, self.kwargs)) if isinstance(value, torch.Tensor)]

    def argument(self, position: int, name: str = "", default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)
