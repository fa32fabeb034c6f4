"""What a batch shows of its items: whether all inputs are equal, and whether the loss compares with its labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from torchmedic.source.objects.graph import saved_by, walk

_MIN_ROWS = 4
_SAMPLE = 1024  # values of two rows that are compared first
_MAX_NODES = 2000  # of a graph that are asked for targets


class BatchLook(NamedTuple):
    """`equal` is a number for the one row that all inputs have, 0 where rows differ.

    `holds` is "labels" or "inputs" for a batch of one tensor. `labels` are numbers for the labels, by field, where
    something is suspected. `value` is what all values of equal inputs are, `alike` what all labels of a batch are.
    """

    rows: int
    equal: int = 0
    labels_differ: bool = False
    holds: str = ""
    labels: frozenset[int] = frozenset()
    value: float | None = None
    alike: int | None = None


NO_LOOK = BatchLook(0)


def look_at(batch: Any) -> BatchLook:
    """Look at a batch: a few microseconds where its rows differ. Only tensors in host memory are read."""
    fields = _fields(batch)
    rows = len(fields[0]) if fields and fields[0].dim() else 0
    if rows < _MIN_ROWS or any(each.dim() == 0 or len(each) != rows or not each.is_cpu for each in fields):
        return NO_LOOK
    inputs = [each for each in fields if each[0].numel() > 1]
    labels = [each for each in fields if each[0].numel() <= 1]
    if len(fields) == 1:
        is_label = bool(labels) and not labels[0].is_floating_point()
        numbers = frozenset(map(_number, labels)) if is_label else frozenset()
        return BatchLook(rows, holds="labels" if is_label else "inputs" if inputs else "", labels=numbers)
    if not (inputs and labels and all(map(_has_equal_rows, inputs))):
        alike = _alike(labels) if inputs and len(labels) == 1 else None
        return BatchLook(rows, labels=frozenset() if alike is None else frozenset(map(_number, labels)), alike=alike)
    row = [value for each in inputs for value in each[0].reshape(-1)[:_SAMPLE].tolist()]
    varied = [each for each in labels if not _has_equal_rows(each)]
    value = float(row[0]) if len(set(row)) == 1 else None
    numbers = frozenset(map(_number, varied or labels))
    return BatchLook(rows, hash(tuple(row)), bool(varied), labels=numbers, value=value)


def _alike(labels: list[torch.Tensor]) -> int | None:
    """The class that all items of a batch have; None where they differ."""
    (field,) = labels
    if field.is_floating_point() or field.is_complex() or not field[0].numel() or not _has_equal_rows(field):
        return None
    return int(field.reshape(-1)[0])


def targets_of(roots: Iterable[Any]) -> frozenset[int]:
    """Numbers for the targets that a loss function of torch's was given, as `labels` of a batch has them.

    Targets that the model is given as well, by an embedding or as indicators, are no labels of other inputs.
    """
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ("target", "indices", "mat1")}
    for node in walk((root.grad_fn for root in roots if isinstance(root, torch.Tensor)), most=_MAX_NODES):
        for name, tensors in found.items():
            with suppress(RuntimeError):  # freed, or overwritten since
                tensor = saved_by(node, name)
                if type(tensor) is torch.Tensor and (tensor.is_cpu or _may_wait(tensor)):
                    tensors.append(tensor)
    given = {_number(indices) for indices in found["indices"]}
    targets = {_number(one): one for one in found["target"] if not any(_indicates(mat, one) for mat in found["mat1"])}
    return frozenset(targets.keys() - given)


def _indicates(given: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a layer was given a column that tells the items of the first target's class from the others."""
    if target.dim() != 1 or given.shape[0] != len(target) or given.device != target.device:
        return False
    is_first = (target == target[0]).to(given.dtype)
    return bool((given == is_first[:, None]).all(0).any()) and not bool(is_first.all())


def _may_wait(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


def _number(labels: torch.Tensor) -> int:
    return hash(tuple(labels.detach().reshape(-1).tolist()))


def _fields(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch; none where it holds anything else."""
    if isinstance(batch, torch.Tensor):
        values = [batch]
    elif isinstance(batch, Mapping):
        values = list(batch.values())
    else:
        values = list(batch) if isinstance(batch, list | tuple) else []
    is_plain = all(type(value) is torch.Tensor and value.layout is torch.strided for value in values)
    return values if is_plain else []


def _has_equal_rows(field: torch.Tensor) -> bool:
    first, second = field[0].reshape(-1), field[1].reshape(-1)
    return torch.equal(first[:_SAMPLE], second[:_SAMPLE]) and bool((field == field[:1]).all())
