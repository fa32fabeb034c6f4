"""What is recorded of the operations of a replay, and which memory their tensors are stored in."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from torchmedic.source.spots import Spot

_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides


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


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor


def storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return int(dense(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):
        return None  # lazy parameters, other sparse layouts, meta without storage, wrapper subclasses


def geometry_of(tensor: torch.Tensor) -> Geometry:
    values = dense(tensor)
    return int(values.storage_offset()), tuple(values.shape), tuple(values.stride())


_MAX_ENUMERATED = 4096  # elements of a view that are compared one by one


@functools.lru_cache(maxsize=1 << 14)  # a step asks about the same views again and again
def overlap(a: Geometry, b: Geometry) -> bool:
    """Whether two views of one storage share an element; for big ones, whether their spans do."""
    if a == b:
        return True
    (first_a, last_a), (first_b, last_b) = _span(a), _span(b)
    if last_a < first_b or last_b < first_a:
        return False
    if math.prod(a[1]) == last_a - first_a + 1 and math.prod(b[1]) == last_b - first_b + 1:
        return True  # neither leaves out an element of its span
    if math.prod(a[1]) > _MAX_ENUMERATED or math.prod(b[1]) > _MAX_ENUMERATED:
        return True
    return not set(_elements(a)).isdisjoint(_elements(b))


def _span(geometry: Geometry) -> tuple[int, int]:
    offset, sizes, strides = geometry
    return offset, offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)


def _elements(geometry: Geometry) -> Iterator[int]:
    offset, sizes, strides = geometry
    if not sizes:
        yield offset
        return
    for position in range(sizes[0]):
        yield from _elements((offset + position * strides[0], sizes[1:], strides[1:]))
