"""The rows of a batch in a call of a module: which tensors have them, and how the results of parts become one."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from torchmedic.source.objects.parts import own_dict

_MAX_DEPTH = 4  # of objects inside objects
_CLOSED = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


_EMPTY = torch.empty(0)  # stands for a tensor
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))


class CannotSplit(Exception):
    """A call of a module cannot be made in parts of its rows."""


class Given:
    """Stands for an argument in a result: the caller gets the argument itself back, not a copy of it."""

    def __init__(self, index: int) -> None:
        self.index = index


def leaves_of(value: Any, depth: int = 0) -> list[Any]:
    """What containers, and objects with tensors in them, hold; in a fixed order."""
    found: list[Any] = []
    for leaf in tree_leaves(value):
        inside = _opened(leaf, depth)
        found += [leaf] if inside is None else leaves_of(inside, depth + 1)
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [each for each in leaves_of(value) if isinstance(each, torch.Tensor)]


def rebuilt(value: Any, leaves: Iterator[Any], depth: int = 0) -> Any:
    """Put other leaves into copies of the containers and objects."""
    found, structure = tree_flatten(value)
    made = []
    for leaf in found:
        inside = _opened(leaf, depth)
        if inside is None:
            made.append(next(leaves))
        else:
            new = copy.copy(leaf)
            new.__dict__ = rebuilt(inside, leaves, depth + 1)
            made.append(new)
    return tree_unflatten(made, structure)


def _opened(leaf: Any, depth: int) -> dict[str, Any] | None:
    """The attributes of an object that has tensors in it, a cache or a batch for example; None for other objects."""
    kind = type(leaf)
    if issubclass(kind, _CLOSED) or depth >= _MAX_DEPTH:
        return None
    inside = own_dict(leaf, kind)
    has_tensors = inside and any(isinstance(each, torch.Tensor) for each in leaves_of(inside, depth + 1))
    return inside if has_tensors else None


def settings_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """The modes, flags and numbers that a module and those inside it have now, and may decide by."""
    found = (item for each in module.modules() for item in vars(each).items())
    return tuple(item for item in found if isinstance(item[1], _PLAIN))


class RowCall:
    """A call of a module with the rows of its batch.

    A tensor has rows if its first dimension is as long as that of the first tensor. The others are passed on whole. A
    tensor that is given twice is one tensor for each part, too.
    """

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._call = call
        leaves = leaves_of((args, kwargs))
        self._places = {index: id(leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        different = {id(leaves[index]): leaves[index] for index in self._places}
        self.tensors: list[torch.Tensor] = list(different.values())
        numbers = {key: number for number, key in enumerate(different)}
        self._places = {index: numbers[key] for index, key in self._places.items()}
        if not all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in self.tensors):
            raise CannotSplit("an argument is a tensor of another class")
        if any(each.layout is not torch.strided for each in self.tensors):
            raise CannotSplit("an argument is a sparse tensor")
        self.count = next((len(each) for each in self.tensors if each.dim()), 0)
        if self.count < 2:
            raise CannotSplit("its arguments have no rows")
        if _has_list((args, kwargs), self.count):
            raise CannotSplit("an argument has a value in Python for each row")
        self.has_rows = [each.dim() > 0 and len(each) == self.count for each in self.tensors]
        for index in self._places:
            leaves[index] = _EMPTY
        self._leaves = leaves
        self._arguments = rebuilt((args, kwargs), iter(leaves))

    @property
    def settings(self) -> tuple[Any, ...]:
        """What the call may decide by beside the values of its tensors."""
        kinds = [(each.dtype, each.dim(), each.requires_grad) for each in self.tensors]
        others = [leaf if isinstance(leaf, _PLAIN) else type(leaf) for leaf in self._leaves]
        return (*kinds, *self.has_rows, *others)

    def release(self) -> None:
        """Hold the tensors no longer: autograd has them, and may have to let go of their memory."""
        self.tensors = []

    def part(self, tensors: Sequence[torch.Tensor], rows: Any, needed: Sequence[bool]) -> list[torch.Tensor]:
        """The tensors with some of their rows, as leaves; those that need a gradient collect it."""
        with torch.no_grad():
            found = [
                (each[rows] if split else each).detach() for each, split in zip(tensors, self.has_rows, strict=True)
            ]
        return [each.requires_grad_(wanted) for each, wanted in zip(found, needed, strict=True)]

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Make the call with other tensors in place of its own; where it returns one of them, there is a `Given`.

        Raises:
            CannotSplit: The call has changed its arguments, or returns a view of one.
        """
        leaves = list(self._leaves)
        for index, number in self._places.items():
            leaves[index] = tensors[number]
        arguments = rebuilt(self._arguments, iter(leaves))
        versions = [each._version for each in tensors]
        result = self._call(*arguments[0], **arguments[1])
        after = leaves_of(arguments)
        if len(after) != len(leaves) or any(one is not other for one, other in zip(after, leaves, strict=True)):
            raise CannotSplit("it changes its arguments")
        if [each._version for each in tensors] != versions:
            raise CannotSplit("it changes a tensor among its arguments in place")
        numbers = {id(each): number for number, each in enumerate(tensors)}
        found = [Given(numbers[id(each)]) if id(each) in numbers else each for each in leaves_of(result)]
        memory = {_storage(each) for each in tensors}
        if any(isinstance(each, torch.Tensor) and _storage(each) in memory for each in found):
            raise CannotSplit("it returns a view of an argument, which the script may change")
        return rebuilt(result, iter(found))


class Joined:
    """The results of parts as one result."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._first: Any = None
        self._leaves: list[Any] | None = None
        self.tensors: list[torch.Tensor] = []
        self.needs_gradient: list[bool] = []

    def add(self, result: Any, rows: slice) -> None:
        """Take over the result of a part.

        Raises:
            CannotSplit: It has not a row for each row of the part, or is not like the results before.
        """
        leaves = leaves_of(result)
        if self._leaves is None:
            self._leaves = leaves
            self._first = result
        if len(leaves) != len(self._leaves):
            raise CannotSplit("its result has another structure for other rows")
        tensors = []
        for leaf, first in zip(leaves, self._leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and isinstance(first, torch.Tensor):
                tensors.append(leaf)
            elif not _is_alike(leaf, first):
                raise CannotSplit("its result has other values beside the tensors for other rows")
        for tensor in tensors:
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                raise CannotSplit("a result is a tensor of another class")
            if not tensor.dim() or len(tensor) != rows.stop - rows.start:
                raise CannotSplit("a result has not one row for each row of the batch")
        if not self.tensors:
            if not tensors:
                raise CannotSplit("its result has no tensors")
            try:
                self.tensors = [_longer(each, self._count) for each in tensors]
            except RuntimeError:
                raise CannotSplit("there is no memory for its whole result") from None
            self.needs_gradient = [False] * len(tensors)
            # The tensors of a part are not to live on in the first result.
            self._leaves = [_EMPTY if isinstance(each, torch.Tensor) else each for each in leaves]
            self._first = rebuilt(result, iter(self._leaves))
        for whole, tensor in zip(self.tensors, tensors, strict=True):
            if whole.shape[1:] != tensor.shape[1:] or whole.dtype != tensor.dtype:
                raise CannotSplit("a result has another shape for other rows")
            whole[rows] = tensor.detach()
        pairs = zip(self.needs_gradient, tensors, strict=True)
        self.needs_gradient = [needed or each.requires_grad for needed, each in pairs]  # only some rows may need it

    def result(self, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Any:
        """The result of the whole call, with these tensors in it, and with these arguments."""
        found = iter(tensors)
        assert self._leaves is not None
        leaves = [
            next(found) if each is _EMPTY else given[each.index] if isinstance(each, Given) else each
            for each in self._leaves
        ]
        return rebuilt(self._first, iter(leaves))


def _has_list(value: Any, count: int) -> bool:
    """Whether a list has something else than tensors for each row. (Sizes and paddings are at most four numbers.)"""
    if isinstance(value, dict):
        return any(_has_list(each, count) for each in value.values())
    if not isinstance(value, list | tuple):
        return False
    is_for_rows = len(value) == count > 4 and not all(isinstance(each, torch.Tensor) for each in value)
    return is_for_rows or any(_has_list(each, count) for each in value)


def _longer(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """An empty tensor with more rows, whose dimensions lie in memory in the same order."""
    sizes = [count, *tensor.shape[1:]]
    strides, step = [0] * tensor.dim(), 1
    for each in sorted(range(tensor.dim()), key=lambda each: (tensor.stride(each), -each)):
        strides[each], step = step, step * sizes[each]
    return tensor.new_empty_strided(sizes, strides)


def _is_alike(one: Any, other: Any) -> bool:
    """Whether a value that is no tensor is the same for other rows: the same object, or an equal plain value."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Given):
        return bool(one.index == other.index)
    return isinstance(one, _PLAIN) and bool(one == other)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
