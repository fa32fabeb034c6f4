"""Values that belong to objects of the user's, and go with them."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class WeakTable(Generic[V]):
    """A value for each of some objects, by their identity; an object that is gone takes its value along.

    A `WeakKeyDictionary` runs Python code at the line where the user drops an object. An exception that a signal
    handler of the script raises in this code, as to end a long step, would be lost. Here, only C code runs.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __setitem__(self, thing: Any, value: V) -> None:
        number = id(thing)
        self._entries[number] = (weakref.ref(thing, functools.partial(self._entries.pop, number)), value)

    def get(self, thing: Any) -> V | None:
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def alive(self) -> list[Any]:
        """The objects that are not gone."""
        return [thing for reference, _ in list(self._entries.values()) if (thing := reference()) is not None]
