"""How many bytes an operation asks for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import msgspec
import torch

from torchmedic.source.lookup.failing_call import Call

_FACTORIES = frozenset("zeros ones empty rand randn eye".split())


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The tensor that an operation would have made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    operands: tuple[tuple[int, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def results_of(calls: Iterable[Call]) -> list[Result]:
    """The result that each call would have made, where operands tell its size: elementwise, product, factory."""
    found: list[Result] = []
    calls = list(calls)
    for known in (call.frame.variables for call in calls if not call.frame.is_user):
        # A loss of torch's broadcasts its two arguments before it calls on.
        if isinstance(known.get("input"), torch.Tensor) and isinstance(known.get("target"), torch.Tensor):
            found += _of_two(known["input"], known["target"])
    for call in calls:
        tensors = [argument.value for argument in call.tensors[:2]]
        if len(tensors) == 2:
            found += _of_two(tensors[0], tensors[1])
        elif call.op in _FACTORIES:
            sizes = [argument.value for argument in call.arguments if not argument.name]
            sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
            if call.op == "eye" and len(sizes) == 1:
                sizes *= 2
            if sizes and all(isinstance(size, int) for size in sizes):
                given = call.get(len(call.arguments), "dtype")
                dtype = given if isinstance(given, torch.dtype) else torch.get_default_dtype()
                found.append(Result(shape=tuple(sizes), dtype=dtype))
    return found


def _of_two(left: torch.Tensor, right: torch.Tensor) -> Iterable[Result]:
    shapes = (tuple(left.shape), tuple(right.shape))
    dtype = torch.promote_types(left.dtype, right.dtype)
    with contextlib.suppress(RuntimeError):
        together = tuple(torch.broadcast_shapes(*shapes))
        yield Result(shape=together, dtype=dtype, operands=shapes)
        yield Result(shape=together, dtype=torch.bool, operands=shapes)  # of a comparison
    if left.dim() > 1 and right.dim() > 1:
        # A product, an outer distance: every row of one with every row of the other.
        yield Result(shape=(*shapes[0][:-1], shapes[1][-1]), dtype=dtype, operands=shapes)
        yield Result(shape=(*shapes[0][:-1], shapes[1][-2]), dtype=dtype, operands=shapes)
