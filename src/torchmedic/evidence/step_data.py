"""The data that steps were given: the variables that hold it, and its ranges."""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.replay.step.earlier_step import BATCH
from torchmedic.replay.trajectory.units import Unit
from torchmedic.source.assignments import read_first

_MIN_ELEMENTS = 8
_MAX_DEPTH = 2  # of containers
_MAX_PARTS = 16  # of a container
_MIN_EQUAL = 2  # values that are one number
_FAR = 10.0  # times the size and the range of all other values: no measurement
_MAX_USUAL = 20.0  # size of three quarters of the values of a column


class Column(NamedTuple):
    """A column of the data that is far from zero, or wide."""

    number: int | None  # None: there is only one
    low: float
    high: float

    @property
    def text(self) -> str:
        name = f"column {self.number}" if self.number is not None else "the values"
        return f"{name} range{'s' if self.number is not None else ''} from {self.low:.6g} to {self.high:.6g}"


class Sample(NamedTuple):
    """The data of one of the steps."""

    call: KeptBackward
    tensor: torch.Tensor


class Placeholder(NamedTuple):
    """A number that stands for a value that is missing."""

    sample: Sample
    column: int
    row: int  # of the sample, the first with this number
    value: float
    times: int
    total: int
    usual: float  # a value of the others

    @property
    def text(self) -> str:
        return f"{self.times} of {self.total} values are {self.value:g}"


class Data(NamedTuple):
    """Data that the first step reads, with the mean and the deviation of its columns."""

    name: str  # an expression: `x`, `batch["x"]`
    path: tuple[Any, ...]  # a variable, and the keys below it; a number alone: of a tensor in the batch
    samples: list[Sample]  # of the first step, and of all later ones
    mean: torch.Tensor
    deviation: torch.Tensor

    @property
    def tensor(self) -> torch.Tensor:
        return self.samples[0].tensor

    @property
    def shown(self) -> str:
        return self.name if isinstance(self.path[0], int) else f"`{self.name}`"

    @property
    def widest(self) -> Column:
        flat = _columns(self.tensor)
        at = int((self.mean.abs() + self.deviation).argmax())
        only = flat.shape[1] == 1
        return Column(None if only else at, float(flat[:, at].min()), float(flat[:, at].max()))

    @property
    def placeholder(self) -> Placeholder | None:
        """A value that some items of the steps have exactly, and that is far beyond all others of its column."""
        parts = [_columns(sample.tensor.detach()) for sample in self.samples]
        for at, column in enumerate(torch.cat(parts).double().T):
            place = int(column.abs().argmax())
            value = float(column[place])
            others = column[column != value]
            if len(column) - len(others) < _MIN_EQUAL or len(others) < _MIN_ELEMENTS:
                continue
            reach = max(float(others.max() - others.min()), float(others.abs().max()))
            if 0 < reach * _FAR < abs(value):
                starts = list(itertools.accumulate(map(len, parts), initial=0))
                found = bisect.bisect_right(starts, place) - 1
                sample = self.samples[found]
                row = (place - starts[found]) * len(sample.tensor) // len(parts[found])
                count = len(column) - len(others)
                return Placeholder(sample, at, row, value, count, len(column), float(others.median()))
        return None

    @property
    def is_unscaled(self) -> bool:
        usual = _columns(self.tensor).abs().double().quantile(0.75, dim=0)  # a few extreme items do not count
        return bool(usual.max() > _MAX_USUAL)

    def standardised(self) -> Callable[[dict[str, Any]], None]:
        """Changes the data to mean 0 and deviation 1, in every step with the numbers of the first."""
        return self._changed(lambda value: _scaled(value, self.mean, self.deviation))

    def without(self, placeholder: Placeholder) -> Callable[[dict[str, Any]], None]:
        """Changes a placeholder to a usual value of its column."""

        def usual(value: torch.Tensor) -> torch.Tensor:
            flat = _columns(value).clone()
            column = flat[:, placeholder.column]
            flat[:, placeholder.column] = torch.where(column == placeholder.value, placeholder.usual, column)
            return flat.reshape(value.shape)

        return self._changed(usual)

    def _changed(self, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
        """Changes the data in the variables of a step."""

        def change(namespace: dict[str, Any]) -> None:
            if isinstance(self.path[0], int):
                tensor = tensors_in(namespace[BATCH])[self.path[0]]
                tensor.data = edit(tensor.data)
            elif self.path[0] in namespace:
                namespace[self.path[0]] = _replaced(namespace[self.path[0]], self.path[1:], edit)

        return change


def _replaced(value: Any, keys: tuple[Any, ...], edit: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with the data in it changed; a container is copied."""
    if not keys:
        return edit(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    if isinstance(value, tuple):
        parts = [_replaced(part, keys[1:], edit) if at == keys[0] else part for at, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    changed = copy.copy(value)
    changed[keys[0]] = _replaced(value[keys[0]], keys[1:], edit)
    return changed


def data_of(units: Sequence[Unit]) -> list[Data]:
    """The data of floating point that the steps read: variables, what is in them, and the batch."""
    first, *later = units
    held = _held(first)
    seen = {tensor.data_ptr() for _, _, tensor in held}
    # A framework may pass the batch on in objects that no variable of the step shows.
    in_batch = [("the batch", (at,), part) for at, part in enumerate(_batch(first)) if part.data_ptr() not in seen]
    held_later = [{path: tensor for _, path, tensor in _held(unit)} for unit in later]
    for unit, known in zip(later, held_later, strict=True):
        known.update({(at,): part for at, part in enumerate(_batch(unit))})
    found = []
    for name, path, value in [*held, *in_batch]:
        if not _is_data(value) or not bool(torch.isfinite(value).all()):
            continue
        samples = [Sample(first.call, value)]
        for unit, known in zip(later, held_later, strict=True):
            other = known.get(path)
            if other is not None and _is_data(other) and other.shape[1:] == value.shape[1:]:
                samples.append(Sample(unit.call, other))
        flat = _columns(value.detach()).double()
        found.append(Data(name, path, samples, flat.mean(0), flat.std(0, correction=0)))
    return found


def _held(unit: Unit) -> list[tuple[str, tuple[Any, ...], torch.Tensor]]:
    """The tensors in the variables that a step reads."""
    runner = unit.step.runner
    namespace = runner._namespace()
    names = sorted(read_first(runner.segment.statements) & namespace.keys())
    return [part for name in names for part in _parts(name, (name,), namespace[name], _MAX_DEPTH)]


def _batch(unit: Unit) -> list[torch.Tensor]:
    return tensors_in(unit.call.batch)


def _is_data(value: torch.Tensor) -> bool:
    if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.layout is not torch.strided:
        return False
    return value.is_floating_point() and value.dim() > 0 and value.numel() >= _MIN_ELEMENTS


def _parts(
    name: str, path: tuple[Any, ...], value: Any, depth: int
) -> Iterator[tuple[str, tuple[Any, ...], torch.Tensor]]:
    """The tensors in a variable, with the expressions for them."""
    if isinstance(value, torch.Tensor):
        yield name, path, value
    elif depth and isinstance(value, list | tuple | Mapping) and len(value) <= _MAX_PARTS:
        items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        for key, part in items:
            shown = f'"{key}"' if isinstance(key, str) else repr(key)
            yield from _parts(f"{name}[{shown}]", (*path, key), part, depth - 1)


def _columns(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1, value.shape[-1]) if value.dim() == 2 else value.reshape(-1, 1)


def _scaled(value: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    safe = torch.where(deviation > 1e-12, deviation, torch.ones_like(deviation))
    if mean.numel() > 1 and (value.dim() != 2 or value.shape[-1] != mean.numel()):
        return value
    flat = (_columns(value).double() - mean) / safe
    return flat.reshape(value.shape).to(value.dtype)
