"""Python's own containers, read past the methods of subclasses.

A list of the user that loads a file in its `__getitem__` must not do so for us.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from io import BytesIO, StringIO
from typing import Any

import torch

CONTAINERS = (list, dict, deque, set)
# Types of one long text or of many bytes, and how long a value is.
TEXTS: dict[type, Callable[[Any], int]] = {
    **dict.fromkeys((str, bytes, bytearray), len),
    **dict.fromkeys((BytesIO, StringIO), lambda file: 0 if file.closed else int(file.tell())),
}
_LOST_REFERENCES = 3  # to the key of a dict: that of the dict, and two of the question
_BASES = (list, tuple, dict, deque, set, frozenset)


def _base(container: Any) -> Any:
    kind = type(container)
    return kind if kind in _BASES else next(base for base in _BASES if issubclass(kind, base))


def length(container: Any) -> int:
    return int(_base(container).__len__(container))


def item(container: Any, index: int) -> Any:
    """One item of a list, tuple or deque."""
    return _base(container).__getitem__(container, index)


def pairs(container: Any, most: int) -> list[tuple[Any, Any]]:
    """Keys or positions with their items: all if there are no more than `most`, else the first and the last."""
    base = _base(container)
    count = length(container)
    if base is dict:
        if count <= most:
            return list(dict.items(container))
        ends = (next(dict.__iter__(container)), next(dict.__reversed__(container)))
        return [(key, dict.__getitem__(container, key)) for key in ends]
    if count <= most:
        return list(enumerate(list(base.__iter__(container))))
    if base in (set, frozenset):
        return [(0, next(base.__iter__(container)))]
    return [(0, item(container, 0)), (-1, item(container, -1))]


def first_values(container: Any, most: int) -> list[Any]:
    """The first items, without their keys."""
    base = _base(container)
    found: Iterator[Any] = iter(dict.values(container)) if base is dict else base.__iter__(container)
    return [each for each, _ in zip(found, range(most), strict=False)]


def items(container: Any) -> list[tuple[Any, Any]]:
    """All items, with their keys or positions."""
    return pairs(container, length(container))


def keys_of(container: dict[Any, Any]) -> str:
    """Whether the keys of a dict are values that may come again, or objects that nobody may have any more.

    Returns:
        `objects` where keys are told apart by what they are, not by their value; `lost` where nobody else has such a
        key any more, so that it cannot be asked for again; else nothing. A cached function has tuples of arguments.
    """
    if not dict.__len__(container):
        return ""
    key = next(dict.__reversed__(container))
    parts = key if type(key) is tuple else (key,)
    if not any(_is_object(part) for part in parts):
        return ""
    del key, parts
    first = next(dict.__iter__(container))
    if type(first) is not tuple:
        return (
            "lost" if sys.getrefcount(first) <= _LOST_REFERENCES and not isinstance(first, weakref.ref) else "objects"
        )
    return (
        "lost" if any(_is_object(part) and sys.getrefcount(part) <= _LOST_REFERENCES for part in first) else "objects"
    )


def _is_object(key: Any) -> bool:
    own = getattr(type(key), "__hash__", None)
    return own is object.__dict__["__hash__"] or isinstance(key, torch.Tensor | weakref.ref)
