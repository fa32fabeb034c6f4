"""The line that made a whole number which is out of its range: a label, an index of a table, an item of a sampler.

A number is out of the range of a table, or the table is too small for the numbers. Their values say which, where they
are many: a table for one class too few meets that class as often as the others, a mistake of the data does not.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from torchmedic.detect.failures.exceptions import Raised
from torchmedic.evidence.bad_value_lines import Line, Watch
from torchmedic.evidence.dataset_item import datasets_in_use, fetch_again, items_of
from torchmedic.evidence.preparation import line_in_collate, line_in_preparation, watched
from torchmedic.observe.step.items import as_tuple
from torchmedic.records import Location
from torchmedic.replay.trace.values import Strays, is_whole, readable
from torchmedic.source.assignments import items_written
from torchmedic.source.live_frames import Frame, node_location, place
from torchmedic.source.lookup.bad_value_makers import maker_of, picked_from
from torchmedic.source.lookup.origins import Origin, attribute_assignments
from torchmedic.source.syntax import syntax_tree

_RARE = 3  # times as often as a value out of range is each value that is in range
_UNUSUAL = 64  # so large a number hardly comes about in another role
_MAX_ROWS = 64  # of a batch that are compared with the data
_MAX_NUMBERS = 1 << 22  # that are counted
_MAX_DRAWN = 100_000  # items of a sampler

Blame = Literal["data", "table", ""]


class Held(NamedTuple):
    """Whole numbers of a data set or of a variable, of which the batch has some, and the statement that made them."""

    values: torch.Tensor
    made: Origin | None
    dataset: Any = None


def blamed(values: torch.Tensor, bound: int, bad: list[int], *, from_one: Blame) -> Blame:
    """Whether the numbers or the size of the table is wrong; empty where the values do not show it.

    `from_one` is what is wrong where the numbers are 1 to the size of the table.
    """
    inside = values[(values >= 0) & (values < bound)]
    if not bad or not inside.numel() or values.numel() > _MAX_NUMBERS:
        return ""
    each = (values.numel() - inside.numel()) / len(bad)
    expected = values.numel() / (bound + len(bad))
    counts = inside.unique(return_counts=True)[1].sort().values
    usual = min(expected, float(counts[len(counts) // 4]))  # the last classes of many are often the rare ones
    if min(bad) < 0 or (len(bad) == 1 and bad[0] >= 2 * bound + 8):
        return "data"
    if each * _RARE <= usual:
        return "data"
    if bad == [bound] and int(inside.min()) == 1 and expected >= _RARE:
        return from_one
    follow = sorted(bad) == list(range(bound, bound + len(bad)))
    return "table" if follow and int(inside.min()) == 0 and expected >= _RARE and each * 2 >= usual else ""


def held_numbers(frames: list[Frame], incident: Raised, tensor: torch.Tensor, strays: Strays) -> Held | None:
    """All the numbers that a batch was picked from; None where no data set and no variable has them."""
    member, items = _member(incident, tensor, strays), as_tuple(_indices(incident))
    if member is None or not member.dim() or len(items) != len(member):
        return None
    for dataset in datasets_in_use():
        for values, made in _contents(frames, dataset):
            if _has_rows(values, member, items):
                return Held(values, made, dataset)
    return None


def line_of_stray(
    frames: list[Frame], incident: Raised, tensor: torch.Tensor, strays: Strays, label: str, held: Held | None
) -> Location | None:
    """The user's line that made numbers which are out of range; None where it cannot be told.

    Args:
        frames: Live ones.
        incident: The exception.
        tensor: The numbers that the operation was given.
        strays: Those out of range.
        label: What to say of the line.
        held: The answer of `held_numbers`.
    """
    if held is not None:
        return _made(frames, held, label)
    items = items_of(incident, tensor, strays.positions)
    member = _member(incident, tensor, strays)
    if not items or member is None:
        variable = picked_from(frames, tensor) or maker_of(frames, tensor)
        return _at(variable, label) if variable is not None else None
    is_wrong = _finder(frozenset(strays.distinct), member.dim() - 1)
    fetched = fetch_again(items[0], is_wrong, whole_numbers=True)
    if fetched is None:
        is_wrong = _finder(frozenset(strays.distinct), member.dim())
        line = line_in_collate(frames, as_tuple(_indices(incident)), is_wrong)
        return place("cause", line.file, line.line, label) if line is not None and not line.is_stored else None
    return _of_line(frames, fetched.line, frozenset(strays.distinct), label)


def line_of_index(frames: list[Frame], sampler: Any, size: int, label: str) -> Location | None:
    """The user's line that made an index beyond the end of a data set, found by drawing from its sampler once more."""

    def is_wrong(value: Any, depth: int) -> bool:
        if isinstance(value, torch.Tensor) and is_whole(value) and value.numel():
            return int(value.max()) >= size
        if isinstance(value, list | tuple) and depth:
            return any(is_wrong(part, depth - 1) for part in value)
        return type(value) is int and value >= size

    def draw() -> bool:
        return any(is_wrong(drawn, 2) for drawn in itertools.islice(iter(sampler), _MAX_DRAWN))

    watch = Watch(is_wrong, whole_numbers=True)
    found = watched(frames[-1].live, draw, watch) if frames else None
    line = watch.last if found else watch.only  # a sampler that shuffles may draw others now
    return place("cause", line.file, line.line, label) if line is not None else None


def _indices(incident: Raised) -> tuple[Any, ...]:
    known = incident.batch_indices
    return tuple(known[0]) if len(known) == 1 and isinstance(known[0], list | tuple) else tuple(known)


def _member(incident: Raised, tensor: torch.Tensor, strays: Strays) -> torch.Tensor | None:
    """The tensor of the batch that the numbers come from: equal to them, or the only one with all that are bad."""
    whole = [read for each in incident.batch if (read := readable(each)) is not None and is_whole(read)]
    for each in whole:
        if each.numel() == tensor.numel() and torch.equal(each.flatten(), tensor.flatten().to(each.dtype)):
            return each
    wanted = torch.tensor(strays.distinct)
    fitting = [each for each in whole if bool(torch.isin(wanted.to(each.dtype), each).all())]
    return fitting[0] if len(fitting) == 1 else None


def _contents(frames: list[Frame], dataset: Any) -> Iterator[tuple[torch.Tensor, Origin | None]]:
    """Whole numbers of a data set by item, each with what made them."""
    held = getattr(dataset, "tensors", None)
    if isinstance(held, list | tuple):
        yield from (
            (each, maker_of(frames, each)) for each in held if isinstance(each, torch.Tensor) and is_whole(each)
        )
    for attr, value in list((getattr(dataset, "__dict__", None) or {}).items()):
        try:
            values = torch.as_tensor(value) if hasattr(value, "__getitem__") and not isinstance(value, str) else None
        except Exception:  # whatever an attribute of the user's is
            continue
        if values is not None and values.dim() and is_whole(values):
            made = list(attribute_assignments(type(dataset), attr))
            yield values, Origin(made[0][0], made[0][1], attr) if len(made) == 1 else None


def _has_rows(values: torch.Tensor, member: torch.Tensor, items: tuple[Any, ...]) -> bool:
    known = list(enumerate(items))[:_MAX_ROWS]
    if values.shape[1:] != member.shape[1:] or not all(type(item) is int and item < len(values) for _, item in known):
        return False
    return all(torch.equal(values[item].to(member.dtype), member[row]) for row, item in known)


def _made(frames: list[Frame], held: Held, label: str) -> Location | None:
    """The statement, or what gave its name to `self.labels = labels`."""
    made = held.made
    if made is None:
        return None
    if not isinstance(made.value, ast.Name | ast.Attribute):
        return _at(made, label)
    line = line_in_preparation(frames, None, [held.dataset], functools.partial(_is_same, held.values))
    return place("cause", line.file, line.line, label) if line is not None else None


def _is_same(held: Any, value: Any, depth: int) -> bool:
    """Whether a value has the content that a data set holds, as a tensor, an array or a container."""
    try:
        if isinstance(held, torch.Tensor):
            other = torch.as_tensor(value)
            return other.shape == held.shape and torch.equal(other, held.to(other.dtype))
        return type(value) is type(held) and len(value) == len(held) and bool(value == held)
    except Exception:  # whatever a variable of the user's is
        return False


def _has_one(bad: frozenset[int], value: Any, depth: int) -> bool:
    """Whether a whole number is bad, or the last item of a container is, or holds one."""
    if isinstance(value, list | tuple | dict) and value and depth:
        last = next(reversed(value.values())) if isinstance(value, dict) else value
        parts = (value[-1],) if isinstance(value, list) else last if isinstance(value, tuple) else (last,)
        return any(_has_one(bad, part, depth - 1) for part in parts)
    return type(value) is int and value in bad


def _at(made: Origin, label: str) -> Location:
    """The statement, or the only one that writes some numbers into what it made."""
    writes = [node for node, item in items_written(syntax_tree(made.file)) if ast.unparse(item.value) == made.name]
    return node_location("cause", made.file, writes[0] if len(writes) == 1 else made.node, label)


def _of_line(frames: list[Frame], line: Line | None, bad: frozenset[int], label: str) -> Location | None:
    """A line, or where the attribute was made that the line only reads."""
    if line is None or not line.is_stored:
        return place("cause", line.file, line.line, label) if line is not None else None
    made = list(attribute_assignments(type(line.owner), line.name)) if line.owner is not None else []
    if len(made) != 1:
        return None
    if not isinstance(getattr(made[0][1], "value", None), ast.Name):
        return node_location("cause", made[0][0], made[0][1], label)
    held = (getattr(line.owner, "__dict__", None) or {}).get(line.name)
    searched = [functools.partial(_is_same, held)]
    if all(number < 0 or number >= _UNUSUAL for number in bad):
        searched.insert(0, functools.partial(_has_one, bad))  # a smaller number counts something else, too
    for is_wrong in searched:
        found = line_in_preparation(frames, None, [line.owner], is_wrong, whole_numbers=True)
        if found is not None:
            return place("cause", found.file, found.line, label)
    return None


def _finder(bad: frozenset[int], dims: int) -> Callable[[Any, int], bool]:
    """Finds the numbers in an item: in the only part of so many dimensions that has one of them."""

    def count(value: Any, depth: int) -> int:
        if type(value) is int:
            return value in bad
        if isinstance(value, list | tuple | dict) and depth:
            parts = list(value.values() if isinstance(value, dict) else value)
            if dims == 1 and parts and all(type(part) is int for part in parts):
                return any(part in bad for part in parts)
            return sum(count(part, depth - 1) for part in parts)
        numbers = readable(torch.as_tensor(value)) if hasattr(value, "__array__") or torch.is_tensor(value) else None
        if numbers is None or not is_whole(numbers):
            return 0
        of_one = not dims and numbers.numel() == 1
        return (numbers.dim() == dims or of_one) and not bad.isdisjoint(numbers.unique().tolist())

    def is_wrong(value: Any, depth: int) -> bool:
        try:
            return count(value, depth) == 1
        except Exception:  # whatever a variable of the user's does when it is looked at
            return False

    return is_wrong
