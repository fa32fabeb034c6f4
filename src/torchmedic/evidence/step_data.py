"""The data that steps were given: the variables that hold it, its ranges, and the line it comes from."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchmedic.evidence.bad_value_lines import Line
from torchmedic.evidence.dataset_item import datasets_in_use, fetch_again
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.preparation import line_in_collate
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.step.batches import items_of
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.records import Location
from torchmedic.replay.step.earlier_step import BATCH
from torchmedic.source.assignments import items_written, read_first
from torchmedic.source.live_frames import Frame, node_location, place
from torchmedic.source.lookup.bad_value_makers import maker_of, picked_from
from torchmedic.source.lookup.optimizers import built_at
from torchmedic.source.lookup.origins import Origin, attribute_assignments
from torchmedic.source.syntax import syntax_tree
from torchmedic.source.user_variables import locals_of

_MIN_ELEMENTS = 8
_MAX_DEPTH = 2  # of containers
_MAX_PARTS = 16  # of a container
_LINE_FACTOR = 3.0  # a variable with values that are so many times smaller is not large yet
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


class Placeholder(NamedTuple):
    """A number that stands for a value that is missing."""

    column: int
    row: int  # the first with this number
    value: float
    times: int
    total: int
    usual: float  # a value of the others

    @property
    def text(self) -> str:
        return f"{self.times} of {self.total} values are {self.value:g}"


class Data(NamedTuple):
    """Data that a step reads, with the mean and the deviation of its columns."""

    name: str  # an expression: `x`, `batch["x"]`
    path: tuple[Any, ...]  # a variable, and the keys below it; a number alone: of a tensor in the batch
    tensor: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor

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
        """A value that some items have exactly, and that is far beyond all others of its column."""
        for at, column in enumerate(_columns(self.tensor.detach()).double().T):
            value = float(column[column.abs().argmax()])
            others = column[column != value]
            if len(column) - len(others) < _MIN_EQUAL or len(others) < _MIN_ELEMENTS:
                continue
            reach = max(float(others.max() - others.min()), float(others.abs().max()))
            if 0 < reach * _FAR < abs(value):
                row, count = int(column.abs().argmax()), len(column) - len(others)
                return Placeholder(at, row, value, count, len(column), float(others.median()))
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


def data_of(divergence: Divergence) -> list[Data]:
    """The data of floating point that the first of the steps reads: variables, what is in them, and the batch."""
    unit = divergence.trajectory.units[0]
    runner = unit.step.runner
    namespace = runner._namespace()
    names = sorted(read_first(runner.segment.statements) & namespace.keys())
    held = [part for name in names for part in _parts(name, (name,), namespace[name], _MAX_DEPTH)]
    seen = {tensor.data_ptr() for _, _, tensor in held}
    batch = tensors_in(unit.call.batch)
    # A framework may pass the batch on in objects that no variable of the step shows.
    held += [("the batch", (at,), tensor) for at, tensor in enumerate(batch) if tensor.data_ptr() not in seen]
    found = []
    for name, path, value in held:
        if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.layout is not torch.strided:
            continue
        if not value.is_floating_point() or value.numel() < _MIN_ELEMENTS:
            continue
        flat = _columns(value.detach()).double()
        if bool(torch.isfinite(flat).all()):
            found.append(Data(name, path, value, flat.mean(0), flat.std(0, correction=0)))
    return found


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


def largest_made_at(frames: list[Frame], call: KeptBackward, largest: float, label: str) -> Location | None:
    """The line that made the data with this largest value, in the step of a backward call; None where it is not held.

    Args:
        frames: Live, and still in that step.
        call: The backward call.
        largest: The largest value of the data.
        label: What to say of the data.
    """
    held = [value for frame in frames for _, value in locals_of(frame.live)]
    for tensor in [*tensors_in(call.batch, _MAX_DEPTH), *(each for value in held for each in tensors_in(value, 1))]:
        is_data = tensor.is_floating_point() and not tensor.requires_grad and tensor.is_cpu
        if is_data and tensor.numel() and float(tensor.abs().amax()) == largest:
            return made_at(frames, call, tensor, label)
    return None


def made_at(
    frames: list[Frame], call: KeptBackward, tensor: torch.Tensor, label: str, *, row: int | None = None
) -> Location | None:
    """The line that made the data: of the data set that the batch comes from, else of the variable.

    Args:
        frames: Live.
        call: The backward call of the step that read the data.
        tensor: The data.
        label: What to say of it.
        row: Of the data, that is to blame: a line that writes some values into the data goes first, if there is one.
    """
    written = row is not None
    datasets = datasets_in_use()
    holder = None
    for dataset in datasets:
        held = getattr(dataset, "tensors", None)
        batch = call.batch
        if isinstance(held, list | tuple) and isinstance(batch, list | tuple) and len(held) == len(batch):
            position = next((at for at, part in enumerate(batch) if _is_same(part, tensor)), None)
            if position is not None:
                maker = maker_of(frames, held[position])
                if maker is not None:
                    return _located(maker, label, written=written)
                holder = dataset
    for dataset in datasets:
        maker = _attribute_of(dataset, call, tensor, row or 0)
        if maker is not None:
            return _located(maker, label, written=written)
    line = _line_in_loading(frames, call, tensor, row or 0)
    if line is not None:
        return place("cause", line.file, line.line, label)
    maker = picked_from(frames, tensor) or maker_of(frames, tensor)
    if maker is None and holder is not None and row is None:  # the function that prepared the tensors is over
        return built_at(frames, holder, "cause", label)
    return _located(maker, label, written=written) if maker is not None else None


def _line_in_loading(frames: list[Frame], call: KeptBackward, tensor: torch.Tensor, row: int) -> Line | None:
    """The line of the data set or of the collate function that made the values of a row, found by fetching again."""
    known = items_of(call.origin)
    if not isinstance(known, list | tuple) or len(known) <= row or not tensor.dim():
        return None
    limit = float(tensor[row].detach().abs().amax()) / _LINE_FACTOR

    def is_large(value: Any, depth: int) -> bool:
        try:
            parts = [torch.as_tensor(value)] if hasattr(value, "__array_interface__") else tensors_in(value, depth)
            return any(part.is_floating_point() and float(part.detach().abs().amax()) >= limit for part in parts)
        except Exception:  # whatever a variable of the user's does when it is looked at
            return False

    fetched = fetch_again(known[row], is_large)
    line = fetched.line if fetched is not None else None
    return line or line_in_collate(frames, tuple(known), is_large)


def _attribute_of(dataset: Any, call: KeptBackward, tensor: torch.Tensor, at: int) -> Origin | None:
    """The attribute of a data set that holds a row of a batch, at the index of its item."""
    items = items_of(call.origin)
    index = items[at] if isinstance(items, list | tuple) and at < len(items) else None
    if not isinstance(index, int) or not tensor.dim():
        return None
    for attr, value in list((getattr(dataset, "__dict__", None) or {}).items()):
        try:
            row = torch.as_tensor(value[index])
        except Exception:  # whatever the attributes of a data set do when they are asked for an item
            continue
        if tensor.is_floating_point() and not row.is_floating_point():
            continue  # bytes and counts are scaled where they are converted
        if row.shape == tensor.shape[1:] and torch.equal(row.to(tensor.dtype), tensor[at]):
            found = [each for each in attribute_assignments(type(dataset), attr) if not _writes_part(each[1])]
            if len(found) == 1:
                return Origin(found[0][0], found[0][1], f"self.{attr}")
    return None


def _writes_part(statement: ast.stmt) -> bool:
    """Whether a statement writes into what it does not make."""
    return isinstance(statement, ast.Assign) and all(isinstance(each, ast.Subscript) for each in statement.targets)


def _located(maker: Origin, label: str, *, written: bool) -> Location:
    """The statement, or the only one that writes some values into what it made."""
    tree = syntax_tree(maker.file) if written else None
    writes = [node for node, item in items_written(tree) if ast.unparse(item.value) == maker.name]
    if len(writes) == 1:
        return node_location("cause", maker.file, writes[0], label)
    return maker.location("cause", label)


def _is_same(part: Any, tensor: torch.Tensor) -> bool:
    return isinstance(part, torch.Tensor) and part.shape == tensor.shape and part.data_ptr() == tensor.data_ptr()


def _columns(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1, value.shape[-1]) if value.dim() == 2 else value.reshape(-1, 1)


def _scaled(value: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    safe = torch.where(deviation > 1e-12, deviation, torch.ones_like(deviation))
    if mean.numel() > 1 and (value.dim() != 2 or value.shape[-1] != mean.numel()):
        return value
    flat = (_columns(value).double() - mean) / safe
    return flat.reshape(value.shape).to(value.dtype)
