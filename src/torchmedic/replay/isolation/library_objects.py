"""Objects of the standard library that hold a state outside of their attributes, and how each gets it back."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import io
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from torchmedic.replay.isolation.bounded_caches import misses_refused
from torchmedic.replay.isolation.undo import Contents, Noted, PutBack

_READERS = (io.BufferedReader, io.FileIO, io.TextIOWrapper)
_WEAK = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)


def of_library(value: Any, kind: type) -> Iterator[PutBack]:
    """How to put an object back; nothing if it is of no such class."""
    if issubclass(kind, _READERS):
        if not value.closed and value.readable() and not value.writable():  # to ask a writer would flush it
            yield Noted(value.tell, value.seek, operator.eq)
    elif issubclass(kind, _WEAK):
        yield Contents(value.data)
    elif issubclass(kind, threading.local):
        yield Contents(value.__dict__)
    elif kind is SimpleQueue:
        yield Noted(lambda: _waiting(value), lambda before: _refill(value, before), _are_same)
    elif kind.__module__ == "functools":
        yield from misses_refused(value)
    elif kind.__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
        yield _shared_memory(value.get_obj())
    elif kind.__module__ == "asyncio.queues":
        yield Contents(value._queue)


def context_variables() -> PutBack:
    """The variables of `contextvars` that this thread has set."""
    before = contextvars.copy_context()

    def put_back() -> None:
        for variable, value in before.items():
            if variable.get(None) is not value:
                variable.set(value)

    return put_back


def _shared_memory(value: Any) -> Noted:
    size = ctypes.sizeof(value)
    read: Callable[[], bytes] = lambda: ctypes.string_at(ctypes.addressof(value), size)  # noqa: E731
    return Noted(read, lambda before: ctypes.memmove(ctypes.addressof(value), before, size), operator.eq)


def _waiting(queue: SimpleQueue[Any]) -> list[Any]:
    """The items of a queue that is written in C, which are not taken out for it."""
    count = queue.qsize()
    held = next(each for each in gc.get_referents(queue) if type(each) is list)
    return list(held[len(held) - count :])


def _refill(queue: SimpleQueue[Any], items: list[Any]) -> None:
    while not queue.empty():
        queue.get_nowait()
    for item in items:
        queue.put(item)


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
