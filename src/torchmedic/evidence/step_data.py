"""The data that steps were given: the variables that hold it, its ranges, and the line it comes from."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchmedic.evidence.dataset_item import datasets_in_use
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.step.batches import items_of
from torchmedic.records import Location
from torchmedic.replay.trajectory.course import Unit
from torchmedic.source.assignments import read_first
from torchmedic.source.live_frames import node_location, syntax_tree
from torchmedic.source.lookup.bad_value_makers import Maker, maker_of
from torchmedic.source.lookup.origins import attribute_assignments

_MIN_ELEMENTS = 8
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


class Data(NamedTuple):
    """A variable that holds data of a step, with the mean and the deviation of its columns."""

    name: str
    tensor: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor

    @property
    def widest(self) -> Column:
        flat = _columns(self.tensor)
        at = int((self.mean.abs() + self.deviation).argmax())
        only = flat.shape[1] == 1
        return Column(None if only else at, float(flat[:, at].min()), float(flat[:, at].max()))

    @property
    def is_unscaled(self) -> bool:
        usual = _columns(self.tensor).abs().double().quantile(0.75, dim=0)  # a few extreme items do not count
        return bool(usual.max() > _MAX_USUAL)

    def standardised(self) -> Callable[[dict[str, Any]], None]:
        """Changes the variable to mean 0 and deviation 1, in every step with the numbers of the first."""

        def change(namespace: dict[str, Any]) -> None:
            value = namespace.get(self.name)
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                namespace[self.name] = _scaled(value, self.mean, self.deviation)

        return change


def data_of(divergence: Divergence) -> list[Data]:
    """The variables with data of floating point that the first of the steps reads."""
    return list(_data(divergence.trajectory.units[0]))


def _data(unit: Unit) -> list[Data]:
    runner = unit.step.runner
    namespace = runner._namespace()
    names = read_first(runner.segment.statements)
    found = []
    for name in sorted(names & namespace.keys()):
        value = namespace[name]
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or value.requires_grad:
            continue
        if not value.is_floating_point() or value.numel() < _MIN_ELEMENTS or value.layout is not torch.strided:
            continue
        flat = _columns(value.detach()).double()
        if bool(torch.isfinite(flat).all()):
            found.append(Data(name, value, flat.mean(0), flat.std(0, correction=0)))
    return found


def made_at(
    evidence: NumbersEvidence, unit: Unit, tensor: torch.Tensor, label: str, *, written: bool = False
) -> Location | None:
    """The line that made the data: of the data set that the batch comes from, else of the variable.

    Args:
        evidence: With the live frames.
        unit: The step that read the data.
        tensor: The data.
        label: What to say of it.
        written: Whether a line that writes some values into the data is to blame, if there is one.
    """
    datasets = datasets_in_use()
    for dataset in datasets:
        held = getattr(dataset, "tensors", None)
        batch = unit.call.batch
        if isinstance(held, list | tuple) and isinstance(batch, list | tuple) and len(held) == len(batch):
            position = next((at for at, part in enumerate(batch) if _is_same(part, tensor)), None)
            if position is not None:
                maker = maker_of(evidence.frames, held[position], [])
                if maker is not None:
                    return _located(maker, label, written=written)
    for dataset in datasets:
        maker = _attribute_of(dataset, unit, tensor)
        if maker is not None:
            return _located(maker, label, written=written)
    maker = maker_of(evidence.frames, tensor, datasets)
    return _located(maker, label, written=written) if maker is not None else None


def _attribute_of(dataset: Any, unit: Unit, tensor: torch.Tensor) -> Maker | None:
    """The attribute of a data set that holds the first row of a batch, at the index of its item."""
    items = items_of(unit.call.origin)
    first = items[0] if isinstance(items, list | tuple) and items else None
    if not isinstance(first, int) or not tensor.dim():
        return None
    for attr, value in list((getattr(dataset, "__dict__", None) or {}).items()):
        try:
            row = torch.as_tensor(value[first])
        except Exception:  # whatever the attributes of a data set do when they are asked for an item
            continue
        if row.shape == tensor.shape[1:] and torch.equal(row.to(tensor.dtype), tensor[0]):
            found = list(attribute_assignments(type(dataset), attr))
            if len(found) == 1:
                return Maker(found[0][0], found[0][1], f"self.{attr}")
    return None


def _located(maker: Maker, label: str, *, written: bool) -> Location:
    """The statement, or the only one that writes some values into what it made."""
    tree = syntax_tree(maker.file) if written else None
    writes = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == maker.name
    ]
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
