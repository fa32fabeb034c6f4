"""What the items of one container are: tensors or not, with a graph or without, and about how many bytes.

Only a few items are looked at, the first and the last ones; a container may be long.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import AsyncGeneratorType, BuiltinMethodType, CoroutineType, FunctionType, GeneratorType
from typing import Any, NamedTuple

import torch

from torchmedic.source.objects.containers import CONTAINERS, first_values, item, length, pairs
from torchmedic.source.objects.graph import existing_node_of
from torchmedic.source.objects.parts import attributes, module_of, parts

_MAX_OBJECTS = 400  # objects that are looked at in one item
_MAX_PARTS = 64  # parts that are looked at in one object
_SAMPLES = 8  # items of a long list that stand for all of it
_MAX_STORAGES = 16  # storages of one item; the neighbours of an item with more are not asked for them
_MAX_NEIGHBOURS = 128  # on each side of an item
_OPEN = ("torch.utils.data", "torch.distributions", "torch.optim")  # of torch, whose objects hold tensors of the user
_PUT_OFF = (FunctionType, partial, GeneratorType, CoroutineType, AsyncGeneratorType)  # what will run some time
_SIZED = frozenset({int, float, str, bytes, bytearray, list, dict, tuple, set, frozenset})


class Weight(NamedTuple):
    """What one item weighs, as the mean of the items that were looked at. `graphs` counts tensors that have a graph.

    `witness` is the first thing of the first item, weakly where that is possible: while it stays, nobody has emptied
    the container. `kinds` are the types of the items.
    """

    tensors: float
    graphs: float
    host: float
    device: float
    witness: Any
    kinds: frozenset[str]
    of_modules: bool = False  # each item is a module

    def has_witness(self, other: Weight) -> bool:
        """Whether the first item is still the one that it was at another time."""
        mine, its = _here(self.witness), _here(other.witness)
        return mine is not None and mine is its if not isinstance(mine, int) else mine == its

    def may_follow(self, other: Weight) -> bool:
        """Whether nobody has emptied the container since: its first item is still there, or lives on, as in a heap."""
        lives = isinstance(other.witness, weakref.ref) and other.witness() is not None
        return lives or self.has_witness(other)


def _here(witness: Any) -> Any:
    return witness() if isinstance(witness, weakref.ref) else witness


def weigh(container: Any) -> Weight | None:
    """Weigh the items of a list, dict, set or deque; None for an empty one."""
    items = _samples(container) if isinstance(container, CONTAINERS) else []
    if not items:
        return None
    weighed = [_Item(each) for each in items]
    for index, each in zip(_places(container), weighed, strict=False):
        each.divide(container, index)
    count = len(weighed)
    return Weight(
        tensors=sum(each.tensors for each in weighed) / count,
        graphs=sum(each.graphs for each in weighed) / count,
        host=sum(each.host for each in weighed) / count,
        device=sum(each.device for each in weighed) / count,
        witness=weighed[0].witness,
        kinds=frozenset(type(each).__name__ for each in items),
        of_modules=all(isinstance(each, torch.nn.Module) for each in items),
    )


def tensors_of(container: Any, *, first: bool = False) -> list[torch.Tensor]:
    """The tensors of the last item but one, which is complete, or of the first."""
    items = _samples(container) if isinstance(container, CONTAINERS) else [container]
    found: list[torch.Tensor] = []
    for each in items[:1] if first else items[-1:]:
        _Item(each, found)
    return found


def _samples(container: Any) -> list[Any]:
    count = length(container)
    if not count:
        return []
    if isinstance(container, dict | set):
        return [part for _, part in pairs(container, 1)]
    return [item(container, index) for index in _places(container)]


def _places(container: Any) -> list[int]:
    """Positions of the samples of a list; not the last one, which may not be complete yet."""
    count = length(container)
    return sorted({0, count // 2, max(0, count - 2)}) if isinstance(container, list | deque) else []


def _beside(container: Any, index: int, way: int) -> Iterator[Any]:
    for distance in range(1, _MAX_NEIGHBOURS):
        at = index + way * distance
        if not 0 <= at < length(container):
            return
        yield item(container, at)


class _Item:
    """One item and everything that it leads to."""

    def __init__(self, whole: Any, found: list[torch.Tensor] | None = None) -> None:
        self._found = found  # where to put the tensors
        self.tensors = self.graphs = self.host = self.device = 0.0
        self._share = 1.0
        self.witness: Any = None
        self._seen: set[int] = set()
        self.storages: dict[int, tuple[float, bool]] = {}  # bytes, and whether they are of the host
        pending: deque[tuple[Any, float]] = deque([(whole, 1.0)])
        while pending and len(self._seen) < _MAX_OBJECTS:
            part, share = pending.popleft()
            if id(part) not in self._seen:
                self._seen.add(id(part))
                self._share = share  # how many alike it stands for
                parts, times = self._look(part)
                pending.extend((each, share * times) for each in parts)
        if self.witness is None:
            self.witness = id(whole)

    def divide(self, container: Any, index: int) -> None:
        """Count a storage in parts, where items beside this one have it too: rows of a batch, the next state."""
        if not 0 < len(self.storages) <= _MAX_STORAGES:
            return
        owners = dict.fromkeys(self.storages, 1)
        for way in (-1, 1):
            left = _MAX_OBJECTS
            for each in _beside(container, index, way):
                other = _Item(each)
                left -= len(other._seen)
                common = other.storages.keys() & owners.keys()
                if not common or left <= 0:
                    break
                for storage in common:
                    owners[storage] += 1
        for storage, count in owners.items():
            nbytes, on_host = self.storages[storage]
            if on_host:
                self.host -= nbytes - nbytes / count
            else:
                self.device -= nbytes - nbytes / count

    def _look(self, part: Any) -> tuple[Iterable[Any], float]:
        """Weigh one object itself; its parts, and how many alike each of them stands for."""
        kind = type(part)
        if issubclass(kind, torch.Tensor):
            self._tensor(part)
            return (), 1.0
        if kind in _SIZED:
            self.host += sys.getsizeof(part) * self._share
        if kind.__name__ == "ndarray" and str(getattr(kind, "__module__", "")) == "numpy":
            self.host += part.nbytes * self._share
            self._witness(part)
        elif isinstance(part, list | tuple | deque):
            return self._of_sequence(part)
        elif isinstance(part, dict):
            return first_values(part, _MAX_PARTS), 1.0
        elif isinstance(part, BaseException):
            self._witness(part)
            return [each.item for each in parts(part, kind, libraries=True)][:_MAX_PARTS], 1.0
        elif isinstance(part, torch.nn.Module):
            self._witness(part)
            return [*part.parameters(), *part.buffers()], 1.0
        elif isinstance(part, BuiltinMethodType):  # `loss.item`, to be called later
            return ([part.__self__] if isinstance(part.__self__, torch.Tensor) else []), 1.0
        elif isinstance(part, _PUT_OFF):
            self._witness(part)
            held = [each.item for each in parts(part, kind)][:_MAX_PARTS]
            return [each for each in held if isinstance(each, (torch.Tensor, *CONTAINERS, tuple))], 1.0
        else:
            return self._of_object(part, kind), 1.0
        return (), 1.0

    def _of_object(self, part: Any, kind: type) -> list[Any]:
        if hasattr(kind, "next_functions"):  # a node of a graph, or the context of a function, which is one
            self.graphs += self._share
        module = module_of(kind)
        if module == "_asyncio":  # a task or future, which is written in C
            return [getattr(part, "_result", None), getattr(part, "_coro", None)]
        if module.startswith("torch.") and not module.startswith(_OPEN):
            return []
        inside = [item for _, item in attributes(part, kind)][:_MAX_PARTS]
        if inside:
            self._witness(part)
        return inside

    def _of_sequence(self, part: Any) -> tuple[Iterable[Any], float]:
        count = length(part)
        if count and all(type(item(part, index)) in (int, float) for index in (0, count // 2, -1)):
            self.host += 24 * count * self._share
            return (), 1.0
        if count <= 2 * _SAMPLES:
            return [each for _, each in pairs(part, count)], 1.0
        return [item(part, index * (count - 1) // (_SAMPLES - 1)) for index in range(_SAMPLES)], count / _SAMPLES

    def _tensor(self, tensor: torch.Tensor) -> None:
        if self._found is not None:
            self._found.append(tensor)
        self.tensors += self._share
        self.graphs += self._share * (existing_node_of(tensor) is not None)
        self._witness(tensor)
        if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.storages:
                nbytes, on_host = storage.nbytes() * self._share, tensor.device.type == "cpu"
                self.storages[storage._cdata] = (nbytes, on_host)
                if on_host:
                    self.host += nbytes
                else:
                    self.device += nbytes

    def _witness(self, thing: Any) -> None:
        if self.witness is None:
            with contextlib.suppress(TypeError):
                self.witness = weakref.ref(thing)
