"""How large this batch is beside those before it, and which of its items made it so.

One sample that is far larger than the others is enough: the collate function pads all of them to its size.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.failures.worker_failures import is_fetch
from torchmedic.observe.step.batches import Given
from torchmedic.observe.step.items import through_subsets
from torchmedic.source.objects.living import living

_MIN_EARLIER_BATCHES = 4  # earlier batches that tell what is usual
_RISES = 3  # of the size of batches: they grow, and not just once
_USUAL = 1.5  # times the largest rise before: more is a batch unlike the others
_MAX_ROWS = 4096  # of a tensor that is read
_MAX_ITEMS_OF_SMALL_DATA_SET = 1000  # items of a batch: a small data set may well be one batch
_MIN_TIMES_USUAL = 4  # as large as the usual one
_MAX_DEPTH = 3  # of containers in a sample
_MIN_ASKED_SHARE = 0.5  # share of the large sample that must have been asked for


class Unusual(NamedTuple):
    """A batch that is larger than all before it."""

    shape: tuple[int, ...]
    usual: tuple[int, ...]  # the shape of the largest one before
    factor: float
    before: int  # how many there were
    dimension: int | None  # the one that differs, if it is one


def comparable(given: Sequence[Given], now: Given | None, grad: bool) -> list[Given]:
    """The calls that can be compared; the last one is the call that failed.

    Args:
        given: What root modules were called with, as far as that was noted: once per step.
        now: The call that was under way, which need not be among them.
        grad: Whether what failed was recorded for backward.
    """
    noted = list(given)
    if now is not None:
        before = noted[:-1] if noted and noted[-1] == now else noted
        found = [*(each for each in before if each[1:] == now[1:]), now]
        if len(found) > 1 or not noted:
            return found
    noted = [each for each in noted if each.grad == grad] or noted
    return [each for each in noted if each[1:] == noted[-1][1:]]


def unusual(calls: Sequence[Given]) -> Unusual | None:
    """The last call, compared with the calls before it."""
    if len(calls) <= _MIN_EARLIER_BATCHES:
        return None
    last = calls[-1]
    before = [each.shape for each in calls[:-1]]
    largest = max(before, key=math.prod)
    factor = math.prod(last.shape) / max(1, math.prod(largest))
    differing = [at for at, (one, two) in enumerate(zip(last.shape, largest, strict=False)) if one != two]
    dimension = differing[0] if len(differing) == 1 and len(last.shape) == len(largest) else None
    return Unusual(tuple(last.shape), tuple(largest), factor, len(before), dimension)


def is_growing(calls: Sequence[Given]) -> bool:
    """Whether sizes never fall and rise several times, the last time by no more than usual."""
    sizes = [max(1, math.prod(each.shape)) for each in calls]
    ratios = [two / one for one, two in itertools.pairwise(sizes)]
    rises = [ratio for ratio in ratios if ratio > 1]
    if len(sizes) <= _MIN_EARLIER_BATCHES or len(rises) < _RISES or min(ratios) < 1:
        return False
    return ratios[-1] <= _USUAL * max(rises[:-1] if ratios[-1] > 1 else rises)


def is_whole_data_set(indices: Sequence[Any]) -> bool:
    """Whether a batch is made of all items that there are in a data set."""
    number = len(indices)
    if (
        number < _MAX_ITEMS_OF_SMALL_DATA_SET
        or not all(type(each) is int for each in indices)
        or set(indices) != set(range(number))
    ):
        return False
    for each in living(Dataset):
        length = getattr(type(each), "__len__", None)
        if length is not None:
            with contextlib.suppress(Exception):  # it is the user's
                if length(each) == number:
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
        if len(tensor) > _MAX_ROWS or tensor.layout is not torch.strided:
            continue
        lengths = _lengths(tensor)
        top = max(range(len(lengths)), key=lengths.__getitem__)
        rest = [each for at, each in enumerate(lengths) if at != top]
        if lengths[top] > 2 * max(rest):
            item = indices[top] if len(indices) == len(lengths) else None
            return Longest(top, lengths[top], statistics.median(rest), item)
    return None


class Largest(NamedTuple):
    item: Any
    shape: tuple[int, ...]
    usual: tuple[int, ...]


def largest_item(batch: Sequence[torch.Tensor], indices: Sequence[Any]) -> Largest | None:
    """The item that is too large, in a batch that is a list with one tensor for each item, such as images."""
    if len(batch) != len(indices) or len(batch) < 2:
        return None
    ordered = sorted(range(len(batch)), key=lambda at: batch[at].numel())
    top, next_one = ordered[-1], ordered[-2]
    if batch[top].numel() <= 2 * batch[next_one].numel():
        return None
    return Largest(indices[top], tuple(batch[top].shape), tuple(batch[next_one].shape))


def _lengths(tensor: torch.Tensor) -> list[int]:
    """The length of each row without its padding; padding is the value at the end of most rows."""
    flat = tensor.reshape(len(tensor), tensor.shape[1], -1)
    ends = flat[:, -1, 0]
    padding = ends.mode().values if ends.dtype != torch.bool else torch.tensor(False)
    filled = (flat != padding).any(-1)
    positions = torch.arange(1, tensor.shape[1] + 1)
    return [int(value) for value in (filled * positions).amax(1)]


class Giant(NamedTuple):
    """Shapes, and the bytes of the whole batch if every sample were as large as the largest."""

    item: Any  # of the data set; None where that is not known
    position: int
    shape: tuple[int, ...]
    usual: tuple[int, ...]
    samples: int
    padded: int


class _Leaf(NamedTuple):
    nbytes: int
    shape: tuple[int, ...]


def giant_sample(evidence: RaisedEvidence, asked: int | None) -> Giant | None:
    """The sample that is far larger than the others of the batch that was being put together when memory ran out."""
    frame = next((each for each in evidence.frames if is_fetch(each.file) and each.function == "fetch"), None)
    inner = evidence.frames[evidence.frames.index(frame) + 1 :] if frame is not None else []
    samples = frame.variables.get("data") if frame is not None else None
    if frame is None or not isinstance(samples, list | tuple) or len(samples) < _MIN_TIMES_USUAL:
        return None
    if any(each.function in ("__getitem__", "__getitems__", "__next__", "__iter__") for each in inner[:1]):
        return None  # the batch is not complete
    leaves = [max(_leaves(sample, _MAX_DEPTH), default=_Leaf(0, ())) for sample in samples]
    sizes = [leaf.nbytes for leaf in leaves]
    position = max(range(len(sizes)), key=lambda at: sizes[at])
    largest, usual = leaves[position], statistics.median_low(sizes)
    if (
        not usual
        or largest.nbytes < _MIN_TIMES_USUAL * usual
        or (asked is not None and asked < _MIN_ASKED_SHARE * largest.nbytes)
    ):
        return None
    known = frame.variables
    indices = through_subsets(getattr(known.get("self"), "dataset", None), known.get("possibly_batched_index"))
    item = indices[position] if isinstance(indices, list | tuple) and len(indices) == len(samples) else None
    return Giant(
        item=item,
        position=position,
        shape=largest.shape,
        usual=leaves[sizes.index(usual)].shape,
        samples=len(samples),
        padded=len(samples) * largest.nbytes,
    )


def _leaves(sample: Any, depth: int) -> Iterator[_Leaf]:
    """The tensors, arrays and lists of numbers in a sample."""
    if isinstance(sample, torch.Tensor):
        yield _Leaf(sample.numel() * sample.element_size(), tuple(sample.shape))
    elif type(sample).__name__ == "ndarray":
        yield _Leaf(int(sample.nbytes), tuple(sample.shape))
    elif isinstance(sample, list | tuple) and sample and all(isinstance(each, int | float) for each in sample[:3]):
        yield _Leaf(8 * len(sample), (len(sample),))
    elif depth and isinstance(sample, list | tuple | dict):
        for part in sample.values() if isinstance(sample, dict) else sample:
            yield from _leaves(part, depth - 1)
