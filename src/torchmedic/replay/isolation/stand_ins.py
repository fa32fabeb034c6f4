"""Iterators that cannot be set back: in a replay other objects stand where the user's variables hold them.

A `for`, `list` or `itertools.islice` takes items in C, where no patched `next` is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchmedic.replay.isolation.outside_world import refuse

_TAKING = frozenset(("send", "throw", "close", "__anext__", "asend", "read", "readline", "readlines", "readinto"))


class IteratorStandIn:
    """Hands on items and all else to other threads, and none to the replay."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        refuse("next")
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name in _TAKING:
            refuse(name)
        return getattr(self._iterator, name)
