"""Python objects that fill memory: rows as dicts, lists of tokens, texts, bytes. How many bytes one container leads to.

There may be millions of objects, and a look at each would take long and need memory itself: some are looked at closely,
and stand for the rest. Tensors and arrays are counted separately, each storage once.
"""

from __future__ import annotations

import array
import contextlib
import io
import sys
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from torchmedic.source.objects.containers import CONTAINERS, item, length
from torchmedic.source.objects.parts import attributes, is_users, own_dict

_TEXTS = (str, bytes, bytearray, array.array, io.BytesIO, io.StringIO)
_LEAVES = frozenset({*_TEXTS, int, float, complex})
_GROUPS = (*CONTAINERS, tuple, frozenset)
_SAMPLES = 64  # items of a long container that stand for all of it
_INNER_SAMPLES = 8  # items of a container in it
_MAX_OBJECTS = 2000  # objects that are looked at in one item
_HEADER_BYTES = 16  # that Python's collector puts before an object
_INTERNED = range(-5, 257)  # numbers that Python has only once


class Pile(NamedTuple):
    """What a container holds in Python objects."""

    nbytes: int
    items: int
    kind: str  # of its items: `dict`, `str`; `object` where they differ
    data: int = 0  # bytes of tensors and arrays, of which 1 at least where there are any


def pile_of(container: Any) -> Pile | None:
    """Weigh a list, dict, set or the like; None for anything else, and for an empty container."""
    if not issubclass(type(container), _GROUPS) or not (count := length(container)):
        return None
    look = _Look()
    looked = [(type(value), look.bytes_of(key) + look.bytes_of(value)) for key, value in _pairs(container, _SAMPLES)]
    kind, number = Counter(kind.__name__ for kind, _ in looked).most_common(1)[0]
    mean = sum(nbytes for _, nbytes in looked) / len(looked)
    return Pile(
        nbytes=int(_own(container) + mean * count),
        items=count,
        kind=kind if number == len(looked) else "object",
        data=max(int(look.data * count / len(looked)), look.met_data),
    )


def text_bytes(value: Any) -> int:
    """The bytes of one text, or of an array of bytes or numbers; 0 for anything else."""
    return sys.getsizeof(value, 0) if type(value) in _TEXTS else 0


def _own(thing: Any) -> int:
    return sys.getsizeof(thing, 0) + _HEADER_BYTES


def _pairs(container: Any, most: int) -> Iterator[tuple[Any, Any]]:
    """Items, with their keys in a dict: all of a short container, else about `most` from everywhere in it."""
    count, kind = length(container), type(container)
    step = 1 if count <= 2 * most else count // most
    if issubclass(kind, dict):
        yield from islice(dict.items(container), 0, None, step)
    elif issubclass(kind, list | tuple):
        yield from ((None, item(container, index)) for index in range(0, count, step))
    else:
        base: Any = next(base for base in _GROUPS if issubclass(kind, base))
        yield from ((None, each) for each in islice(base.__iter__(container), 0, None, step))


class _Look:
    """Looks at items of one container, one after the other."""

    def __init__(self) -> None:
        self.data = 0.0
        self.met_data = False
        self._seen: set[int] = set()  # what several items share is there once

    def bytes_of(self, whole: Any) -> float:
        nbytes, looked = 0.0, 0
        pending: deque[tuple[Any, float]] = deque([(whole, 1.0)])
        while pending and looked < _MAX_OBJECTS:
            thing, share = pending.popleft()
            looked += 1
            if thing is None or id(thing) in self._seen or (type(thing) is int and thing in _INTERNED):
                continue
            self._seen.add(id(thing))
            own, inside, times = self._one(thing, type(thing), share)
            nbytes += share * own
            pending.extend((each, share * times) for each in inside)
        return nbytes

    def _one(self, thing: Any, kind: type, share: float) -> tuple[int, list[Any], float]:
        """The bytes of an object itself, what it leads to, and how many alike each of these stands for."""
        if kind in _LEAVES:
            return sys.getsizeof(thing), [], 1.0
        if issubclass(kind, torch.Tensor) or (kind.__name__ == "ndarray" and kind.__module__ == "numpy"):
            self.met_data = True
            self.data += share * self._memory(thing)
        elif issubclass(kind, _GROUPS):
            found = list(_pairs(thing, _INNER_SAMPLES))
            inside = [each for pair in found for each in pair]
            return _own(thing), inside, length(thing) / max(1, len(found))
        elif is_users(kind) and not issubclass(kind, type | torch.nn.Module):
            table = own_dict(thing, kind)
            own = _own(thing) + (_own(table) if table else 0)
            return own, [each for _, each in attributes(thing, kind)], 1.0
        return 0, [], 1.0

    def _memory(self, data: Any) -> int:
        """The bytes of a tensor of the host or an array; 0 where they were counted before, or belong to another."""
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):  # what has no memory of its own
            if not isinstance(data, torch.Tensor):
                return int(data.nbytes) if data.base is None else 0
            storage = data.untyped_storage()
            if data.device.type == "cpu" and storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                return int(storage.nbytes())
        return 0
