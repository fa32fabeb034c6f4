"""Which item of a dataset an element of a tensor stands for, and the item fetched again, watched line by line.

The rows of a batch are the items that its sampler drew, in order. An element of another tensor is traced back to a row
only if the values of the batch bear it out: a target that was flattened, shifted or moved, or the batch itself.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmedic.detect.failures.exceptions import Raised
from torchmedic.evidence.bad_value_lines import Line, Watch
from torchmedic.replay.isolation.torch_state import muted
from torchmedic.replay.trace.values import is_whole, readable
from torchmedic.source.lookup.bad_value_makers import shares_memory
from torchmedic.source.objects.finite import is_bad

_MAX_DATASETS = 4
# What `default_collate` makes of Python's numbers.
_MADE_OF_NUMBERS = {float: "torch.float64", int: "torch.int64", bool: "torch.bool"}


class Fetched(NamedTuple):
    """An item that was fetched again and is bad."""

    dataset: Any
    line: Line | None  # None where the dataset holds the bad value as it is


def collations_in_use() -> list[tuple[Any, Any]]:
    """The datasets of all living loaders, those that are being iterated over first, each with its collate function.

    A dataset stands for its subsets: an index of a batch is one of the whole. A loader that only a `for` statement held
    is gone when the loop has raised; the sampler of its last pass still has the dataset, and no collate function.
    """
    found: dict[tuple[int, int], tuple[Any, Any]] = {}
    alive = gc.get_objects()
    # An iterator may outlive its loader.
    for kind, *attrs in (
        (_BaseDataLoaderIter, "_dataset", "_collate_fn"),
        (DataLoader, "dataset", "collate_fn"),
        ((RandomSampler, SequentialSampler), "data_source", ""),
    ):
        known = {key for key, _ in found} if not attrs[1] else set()
        for value in alive:
            if issubclass(type(value), kind):
                dataset, collate = (getattr(value, attr, None) for attr in attrs)
                pair = (_whole(dataset), collate)
                if id(pair[0]) not in known:
                    found.setdefault((id(pair[0]), id(pair[1])), pair)
    return list(found.values())


def datasets_in_use() -> list[Any]:
    """The datasets of `collations_in_use`, each once."""
    return list({id(dataset): dataset for dataset, _ in collations_in_use() if dataset is not None}.values())


def fetch_again(
    index: Any, is_wrong: Callable[[Any, int], bool] = is_bad, *, whole_numbers: bool = False
) -> Fetched | None:
    """Fetch an item that was bad. None where no dataset in use gives a bad item for that index.

    Args:
        index: Of the item.
        is_wrong: Given a value and a depth, tells whether it is bad, or holds something bad so deep inside.
        whole_numbers: Whether a whole number of Python's can be bad.
    """
    for dataset in datasets_in_use()[:_MAX_DATASETS]:
        if not hasattr(dataset, "__getitem__"):
            continue
        watch = Watch(is_wrong, whole_numbers=whole_numbers)
        state = torch.get_rng_state()
        try:
            with muted(), watch:
                item = dataset[index]
        except Exception:
            continue
        finally:
            torch.set_rng_state(state)
        if is_wrong(item, 3):
            return Fetched(dataset, watch.line_of(item) or watch.last)
    return None


def runs_over_its_end(dataset: Any) -> Any:
    """The dataset whose items have one length, and then get shorter one by one, as windows beyond the data do."""
    whole, state = _whole(dataset), torch.get_rng_state()
    try:
        with muted():
            last = len(whole) - 2  # the last item may be empty
            full, short = _length(whole[0]), _length(whole[last])
            lengths = [_length(whole[last - full + short + ahead]) for ahead in (-1, 0, 1, 2)]
    except Exception:
        return None
    finally:
        torch.set_rng_state(state)
    return whole if short > 0 and lengths == [full, full, full - 1, full - 2] else None


def _length(item: Any) -> int:
    """The first size of the first array of an item; 0 where there is none."""
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else (item,)
    shapes = [tuple(getattr(part, "shape", ())) for part in parts]
    return next((int(shape[0]) for shape in shapes if shape), 0)


def line_of_dtype(incident: Raised, tensor: torch.Tensor) -> Line | None:
    """The line of a dataset that gives a tensor of the batch its dtype; None where the items have another one."""
    indices = incident.batch_indices
    if len(indices) == 1 and isinstance(indices[0], list | tuple):
        indices = tuple(indices[0])
    member = next((member for member in incident.batch if shares_memory(member, tensor)), None)
    if not indices or indices[0] is None or member is None:
        return None
    is_plain = all(collate in (default_collate, None) for _, collate in collations_in_use())
    row = tuple(member.shape[1:])

    def fitting(exact: bool, value: Any, depth: int) -> int:
        if isinstance(value, list | tuple | dict) and depth:
            parts = value.values() if isinstance(value, dict) else value
            return sum(fitting(exact, part, depth - 1) for part in parts)
        if type(value) in _MADE_OF_NUMBERS:
            return is_plain and not row and str(tensor.dtype) == _MADE_OF_NUMBERS[type(value)]
        kind = "torch." + str(getattr(value, "dtype", "")).removeprefix("torch.")
        shape = tuple(getattr(value, "shape", ())) if getattr(value, "ndim", None) == len(row) else None
        return str(tensor.dtype) == kind and shape is not None and (shape == row or not exact)

    for exact in (True, False):  # a collate function may have made a row longer
        fetched = fetch_again(indices[0], functools.partial(_is_one, functools.partial(fitting, exact)))
        if fetched is not None:
            return fetched.line
    return None


def _is_one(fitting: Callable[[Any, int], int], value: Any, depth: int) -> bool:
    return fitting(value, depth) == 1


def _whole(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def items_of(incident: Raised, tensor: torch.Tensor, positions: list[tuple[int, ...]]) -> list[Any]:
    """The dataset index of each position; empty where it cannot be proven."""
    indices = incident.batch_indices
    if len(indices) == 1 and isinstance(indices[0], list | tuple):
        indices = tuple(indices[0])
    if not indices or all(index is None for index in indices) or not positions:
        return []
    for member in incident.batch:
        rows = _rows(member, tensor, positions, len(indices))
        if rows is not None:
            return list(dict.fromkeys(indices[row] for row in rows))
    return []


def _rows(member: Any, tensor: torch.Tensor, positions: list[tuple[int, ...]], length: int) -> list[int] | None:
    """The rows of one tensor of the batch that hold these elements, if it is where they came from."""
    batch = readable(member)
    if batch is None or batch.dim() == 0 or batch.shape[0] != length or tensor.numel() == 0:
        return None
    if batch.numel() == tensor.numel() and _same(batch, tensor):
        per_row = batch.numel() // length
        return [_flat(position, tensor.shape) // per_row for position in positions]
    # A slice of the batch (`tokens[:, 1:]`), flattened or not: the value must stand in exactly the rows named.
    if not (is_whole(batch) and is_whole(tensor)):
        return None
    wanted = {tensor[position].item() for position in positions}
    holding = [row for row in range(length) if wanted & set(batch[row].flatten().tolist())] if length <= 1024 else []
    return holding if len(holding) == 1 else None


def _same(batch: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Equal element by element, or by the same amount apart (labels from which 1 was taken)."""
    difference = tensor.flatten().double() - batch.flatten().double()
    return bool((difference == difference[0]).all())


def _flat(position: tuple[int, ...], shape: torch.Size) -> int:
    flat = 0
    for index, size in zip(position, shape, strict=True):
        flat = flat * size + index
    return flat
