"""The items of a batch: indices of the user's own dataset."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import Subset


def items_of(origin: tuple[Any, weakref.ref[Any] | None]) -> Any:
    """The items of a batch, as indices of the user's own dataset."""
    indices, source = origin
    iterator = source() if source is not None else None
    return through_subsets(getattr(iterator, "_dataset", None), indices)


def as_tuple(items: Any) -> tuple[Any, ...]:
    """The items of a batch as a tuple, whatever the sampler gave."""
    return tuple(items) if isinstance(items, list | tuple) else () if items is None else (items,)


def through_subsets(dataset: Any, index: Any) -> Any:
    """An index, or a batch of them, as one of the dataset that `random_split` and `Subset` were made of."""
    if isinstance(index, list | tuple) and isinstance(dataset, Subset):
        return [through_subsets(dataset, item) for item in index]
    while isinstance(dataset, Subset):
        try:
            index, dataset = dataset.indices[index], dataset.dataset
        except (IndexError, KeyError, TypeError):
            return index
    return index
