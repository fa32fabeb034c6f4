"""The call that made a saved tensor: where in the graph its arguments are found, and the call made again.

A pattern is made once, when prices are noted, and bound to the graph of every step. It holds no tensors. A recipe holds
the arguments of one step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.recovery.handles import SavedTensor
from torchmedic.recovery.living_tensors import is_unshared, plainly
from torchmedic.recovery.saved_tensors import SavedTensors


class Unknown(Exception):
    """There is no recipe."""


class Recipe:
    """A call with its arguments: saved tensors, other recipes, constants."""

    def __init__(self, pattern: Pattern, arguments: dict[str, Any]) -> None:
        self._pattern = pattern
        self._arguments = arguments

    def sources(self) -> Iterator[SavedTensor]:
        """The saved tensors that the recipe needs."""
        for each in self._arguments.values():
            if isinstance(each, SavedTensor):
                yield each
            elif isinstance(each, Recipe):
                yield from each.sources()

    def compute(self) -> torch.Tensor:
        values = {name: _value(each) for name, each in self._arguments.items()}
        pattern = self._pattern
        function = pattern.function
        if pattern.in_place is not None and self._is_own(values):
            function = pattern.in_place
        result = function(**values)
        found: torch.Tensor = result[pattern.index] if isinstance(result, tuple | list) else result
        return found

    def _is_own(self, values: dict[str, Any]) -> bool:
        """Whether the first value belongs to this recipe alone, and can take the result."""
        name, first = next(iter(values.items()))
        return (
            isinstance(self._arguments[name], Recipe)
            and is_unshared(first)
            and all(
                (each.dtype, each.shape) == (first.dtype, first.shape)
                for each in values.values()
                if isinstance(each, torch.Tensor)
            )
        )

    def new_storage(self) -> torch.UntypedStorage:
        """A storage of its own with the result, laid out as the original was."""
        shape, strides, nbytes = self._pattern.layout
        with plainly():
            result = self.compute()
            if result.stride() != strides or result.untyped_storage().nbytes() != nbytes:
                laid_out = torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device)
                result = laid_out.copy_(result)
        return result.untyped_storage()


class Kept(NamedTuple):
    """A tensor that a node keeps."""

    name: str
    kind: tuple[Any, ...] | None  # None: the node keeps none
    address: int  # of a weight for which a number was guessed; 0 where any tensor will do

    @property
    def key(self) -> Any:
        return (self.kind, self.address)

    def bound(self, node: Any, saved: SavedTensors) -> SavedTensor | None:
        found = saved.source(node, self.name)
        if (None if found is None else found.kind) != self.kind:
            raise Unknown
        if self.address and (found is None or found.address != self.address):
            raise Unknown
        return found


class Leaf(NamedTuple):
    """A parameter that no node keeps. It is copied, as it may be changed before backward."""

    key: Any

    def bound(self, node: Any, saved: SavedTensors) -> torch.Tensor:
        leaf: torch.Tensor | None = getattr(node, "variable", None)
        if leaf is None or (tuple(leaf.shape), leaf.dtype) != self.key:
            raise Unknown
        return leaf.detach().clone()


class Pattern:
    """A call, and where its arguments are found from the node that it made."""

    def __init__(self, node: Any, function: Callable[..., Any], index: int, in_place: Any = None) -> None:
        self.function = function
        self.in_place = in_place  # the same operator, with the result in its first argument
        self.index = index  # of the result
        self.constants: dict[str, Any] = {}
        self.places: dict[str, tuple[int | None, Kept | Leaf | Pattern]] = {}  # of tensors: an edge, what lies there
        self.layout: tuple[tuple[int, ...], tuple[int, ...], int] = ((), (), 0)  # shape, strides and bytes
        self.seconds = 0.0
        self._type = type(node)
        self._numbers: dict[str, Any] = {}  # that the node keeps
        self._order: list[str] = []

    def keep(self, node: Any, name: str) -> None:
        """Take a number from the node; a node with another number has another pattern."""
        self.constants[name] = self._numbers[f"_saved_{name}"] = getattr(node, f"_saved_{name}")

    def done(self, order: list[str]) -> Pattern:
        self._order = order
        return self

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """What tells one kind of call from another."""
        constants = [tuple(each) if isinstance(each, list) else each for each in self.constants.values()]
        return (self._type, self.index, *constants, *(each.key for _, each in self.places.values()))

    def bound(self, node: Any, saved: SavedTensors) -> Recipe:
        """The recipe of one step.

        Raises:
            Unknown: The graph is another one.
        """
        if type(node) is not self._type or any(getattr(node, key) != each for key, each in self._numbers.items()):
            raise Unknown
        arguments = dict.fromkeys(self._order)
        arguments.update(self.constants)
        edges = None
        for name, (edge, what) in self.places.items():
            owner = node
            if edge is not None:
                edges = edges or node.next_functions
                owner = edges[edge][0]
            arguments[name] = what.bound(owner, saved)
        return Recipe(self, arguments)


def _value(argument: Any) -> Any:
    if isinstance(argument, SavedTensor):
        return argument.value()
    return argument.compute() if isinstance(argument, Recipe) else argument
