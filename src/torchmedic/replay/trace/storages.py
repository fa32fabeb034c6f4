"""Which memory a tensor is stored in, and whether two views of it share an element."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides


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


def overlap(a: Geometry, b: Geometry) -> bool:
    """Whether two views of one storage share an element; for big ones, whether their spans do."""
    if a == b:
        return True
    (first_a, last_a), (first_b, last_b) = _span(a), _span(b)
    if last_a < first_b or last_b < first_a:
        return False
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
