"""The line that made the data of a step: of its data set, of the collate function, or of the variable."""

from __future__ import annotations

import ast
import os
from typing import Any

import torch

from torchmedic.evidence.bad_value_lines import Line
from torchmedic.evidence.dataset_item import datasets_in_use, fetch_again
from torchmedic.evidence.preparation import line_in_collate
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.step.items import items_of
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.records import Location
from torchmedic.source.assignments import flat, items_written, targets_of
from torchmedic.source.live_frames import Frame, node_location, place
from torchmedic.source.lookup.bad_value_makers import maker_of, picked_from
from torchmedic.source.lookup.optimizers import built_at
from torchmedic.source.lookup.origins import Origin, attribute_assignments
from torchmedic.source.syntax import FUNCTIONS, calls_in, has_line, nodes_in, syntax_tree
from torchmedic.source.user_variables import locals_of

_MAX_DEPTH = 2  # of containers
_LINE_FACTOR = 3.0  # a variable with values that are so many times smaller is not large yet


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
    holder, part_at = None, 0
    for dataset in datasets:
        held = getattr(dataset, "tensors", None)
        batch = call.batch
        if isinstance(held, list | tuple) and isinstance(batch, list | tuple) and len(held) == len(batch):
            position = next((at for at, part in enumerate(batch) if _is_same(part, tensor)), None)
            if position is not None:
                maker = maker_of(frames, held[position])
                if maker is not None:
                    return _located(maker, label, written=written)
                holder, part_at = dataset, position
    for dataset in datasets:
        maker = _attribute_of(dataset, call, tensor, row or 0)
        if maker is not None:
            return _located(maker, label, written=written)
    line = _line_in_loading(frames, call, tensor, row or 0)
    if line is not None:
        return place("cause", line.file, line.line, label)
    maker = picked_from(frames, tensor) or maker_of(frames, tensor)
    if maker is None and holder is not None and row is None:  # the function that prepared the tensors is over
        built = built_at(frames, holder, "cause", label)
        return (argument_made_at(built, part_at, label) if built is not None else None) or built
    return _located(maker, label, written=written) if maker is not None else None


def argument_made_at(built: Location, position: int, label: str) -> Location | None:
    """The only assignment of a name in its function, or of an attribute in its class, that a call is given."""
    file = os.path.abspath(built.file)
    tree = syntax_tree(file)
    for call in calls_in(tree):
        given = call.args[position] if len(call.args) > position else None
        if (call.lineno, call.col_offset + 1) != (built.line, built.column):
            continue
        kinds = FUNCTIONS if isinstance(given, ast.Name) else ast.ClassDef
        around = [node for node in nodes_in(tree) if isinstance(node, kinds) and has_line(node, built.line)]
        if not isinstance(given, ast.Name | ast.Attribute) or not around:
            continue
        statements = [node for node in nodes_in(around[-1]) if isinstance(node, ast.Assign | ast.AnnAssign)]
        targets = [(node, target) for node in statements for target in flat(targets_of(node))]
        found = [node for node, target in targets if ast.unparse(target) == ast.unparse(given)]
        return node_location("cause", file, found[0], label) if len(found) == 1 else None
    return None


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
    return attribute_with(dataset, index, tensor[at]) if isinstance(index, int) and tensor.dim() else None


def attribute_with(dataset: Any, index: int, row: torch.Tensor, *, of_dtype: bool = False) -> Origin | None:
    """The only assignment of an attribute of a data set that holds a row of a batch; `of_dtype`: in its very dtype."""
    for attr, value in list((getattr(dataset, "__dict__", None) or {}).items()):
        try:
            item = torch.as_tensor(value[index])
        except Exception:  # whatever the attributes of a data set do when they are asked for an item
            continue
        if item.dtype != row.dtype and (of_dtype or (row.is_floating_point() and not item.is_floating_point())):
            continue  # bytes and counts are scaled where they are converted
        if item.shape == row.shape and torch.equal(item.to(row.dtype), row):
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
