"""One sample of a batch that is far larger than the others, which the collate function makes all as large as it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.failures.worker_failures import is_fetch
from torchmedic.observe.step.batches import through_subsets

_MIN_TIMES_USUAL = 4  # as large as the usual one
_DEEP = 3
_MIN_ASKED_SHARE = 0.5  # of the large sample, that must have been asked for


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
    """The sample that is far larger than the others of the batch that was being put together when memory ran out.

    Args:
        evidence: Of the exception.
        asked: How much was asked for, if that is known.
    """
    frame = next((each for each in evidence.frames if is_fetch(each.file) and each.function == "fetch"), None)
    inner = evidence.frames[evidence.frames.index(frame) + 1 :] if frame is not None else []
    samples = frame.variables.get("data") if frame is not None else None
    if frame is None or not isinstance(samples, list | tuple) or len(samples) < _MIN_TIMES_USUAL:
        return None
    if any(each.function in ("__getitem__", "__getitems__", "__next__", "__iter__") for each in inner[:1]):
        return None  # the batch is not complete
    leaves = [max(_leaves(sample, _DEEP), default=_Leaf(0, ())) for sample in samples]
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
