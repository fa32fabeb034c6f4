"""Python's own containers, read past whatever a subclass of the user's makes of them.

A list that loads a file in its `__getitem__` shall not do so for us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from io import BytesIO, StringIO
from typing import Any

CONTAINERS = (list, dict, deque, set)
# What is one long text or many bytes, and how long it is.
TEXTS: dict[type, Callable[[Any], int]] = {
    **dict.fromkeys((str, bytes, bytearray), len),
    **dict.fromkeys((BytesIO, StringIO), lambda file: 0 if file.closed else int(file.tell())),
}
_BASES = (list, tuple, dict, deque, set, frozenset)


def _base(container: Any) -> Any:
    return next(base for base in _BASES if isinstance(container, base))


def length(container: Any) -> int:
    return int(_base(container).__len__(container))


def item(container: Any, index: int) -> Any:
    """Of a list, tuple or deque."""
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


def values(container: Any, most: int) -> list[Any]:
    """The first items of a dict or set."""
    base = _base(container)
    found: Iterator[Any] = iter(dict.values(container)) if base is dict else base.__iter__(container)
    return [each for each, _ in zip(found, range(most), strict=False)]
