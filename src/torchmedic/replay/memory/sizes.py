"""How large this batch is beside those before it, and which of its items made it so."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from torchmedic.observe.batches import Given

_FEW = 4  # earlier batches that tell what is usual
_ROWS = 4096
_MANY = 1000  # items of a batch: a small data set may well be one batch


class Unusual(NamedTuple):
    """A batch that is larger than all before it."""

    shape: tuple[int, ...]
    usual: tuple[int, ...]  # the shape of the largest one before
    factor: float
    before: int  # how many there were
    dimension: int | None  # the one that differs, if it is one


def unusual(given: Sequence[Given]) -> Unusual | None:
    """The last call of a root module, held against those before it in the same mode."""
    if not given:
        return None
    last = given[-1]
    before = [each.shape for each in list(given)[:-1] if each.training == last.training]
    if len(before) < _FEW:
        return None
    largest = max(before, key=math.prod)
    factor = math.prod(last.shape) / max(1, math.prod(largest))
    differing = [at for at, (one, two) in enumerate(zip(last.shape, largest, strict=False)) if one != two]
    dimension = differing[0] if len(differing) == 1 and len(last.shape) == len(largest) else None
    return Unusual(tuple(last.shape), tuple(largest), factor, len(before), dimension)


def is_growing(given: Sequence[Given]) -> bool:
    """Whether every batch is at least as large as the one before it, and together they have doubled."""
    sizes = [math.prod(each.shape) for each in given if each.training == given[-1].training]
    if len(sizes) < _FEW + 2:
        return False
    steps = [two > one for one, two in itertools.pairwise(sizes)]
    return all(two >= one for one, two in itertools.pairwise(sizes)) and sum(steps) >= len(steps) // 2


def is_whole_data_set(indices: Sequence[Any]) -> bool:
    """Whether a batch is made of all items that there are in a data set."""
    number = len(indices)
    if number < _MANY or not all(type(each) is int for each in indices) or set(indices) != set(range(number)):
        return False
    for each in gc.get_objects():
        if issubclass(type(each), Dataset) and hasattr(type(each), "__len__"):
            with contextlib.suppress(Exception):  # it is the user's
                if len(each) == number:
                    return True
    return False


class Longest(NamedTuple):
    row: int
    length: int
    usual: float
    item: Any = None


def longest_row(batch: Sequence[torch.Tensor], indices: Sequence[Any], length: int) -> Longest | None:
    """The row of a padded batch that is far longer than the others: the item of the data set to look at."""
    for tensor in batch:
        if tensor.device.type != "cpu" or tensor.dim() < 2 or tensor.shape[1] != length or len(tensor) < 2:
            continue
        if len(tensor) > _ROWS or tensor.layout is not torch.strided:
            continue
        lengths = _lengths(tensor)
        top = max(range(len(lengths)), key=lengths.__getitem__)
        rest = [each for at, each in enumerate(lengths) if at != top]
        if lengths[top] > 2 * max(rest):
            item = indices[top] if len(indices) == len(lengths) else None
            return Longest(top, lengths[top], statistics.median(rest), item)
    return None


def _lengths(tensor: torch.Tensor) -> list[int]:
    """How far each row goes until nothing but its padding, the value at the end of most rows, follows."""
    flat = tensor.reshape(len(tensor), tensor.shape[1], -1)
    ends = flat[:, -1, 0]
    padding = ends.mode().values if ends.dtype != torch.bool else torch.tensor(False)
    filled = (flat != padding).any(-1)
    positions = torch.arange(1, tensor.shape[1] + 1)
    return [int(value) for value in (filled * positions).amax(1)]
