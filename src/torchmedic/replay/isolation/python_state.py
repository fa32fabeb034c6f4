"""What a step changes in Python: counters, lists, averages, caches, random generators. A replay puts all of it back.

Everything that the user's variables lead to is copied one level deep, and each container that has changed in the replay
gets back what it held. Iterators cannot be set back: the replay knows the iterators that were there, and does not read
them.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import gc
import io
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from torchmedic.replay.isolation.bounded_caches import bounded_cache
from torchmedic.replay.isolation.library_objects import context_variables, of_library
from torchmedic.replay.isolation.stand_ins import IteratorStandIn
from torchmedic.replay.isolation.undo import (
    Contents,
    Noted,
    PutBack,
    array,
    cell,
    class_attributes,
    class_of,
    global_hooks,
    is_bound,
    of_tensor,
    settings,
    slot,
    steady,
    told_by_itself,
)
from torchmedic.source.objects.containers import CONTAINERS, first_values, length
from torchmedic.source.objects.parts import attributes, is_users, members_of, own_dict, parts, parts_of_tensor
from torchmedic.source.user_code import PACKAGE, is_user_file
from torchmedic.source.user_variables import user_modules

_MAX_SECONDS = 0.3  # for the walk
_MAX_OBJECTS = 300_000
THOROUGH_SECONDS = 30.0  # for a walk that must come to its end, where nothing else is to be done
_MAX_THOROUGH_OBJECTS = 5_000_000
_MAX_ITEMS = 10_000  # of a container that are all followed
_MAX_FOLLOWED = 1_000  # items of a longer one
_MAX_ARRAY_BYTES = 1 << 20  # of one array that is copied
_MAX_ALL_ARRAY_BYTES = 64 << 20
_HEAP_TYPE = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`: a class that was made in Python, whose objects may have attributes
_ATOMS = frozenset(
    (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size, slice, types.CodeType)
)
# Packages whose objects belong to other threads too, or are the machinery around the step. A kernel of a notebook is on
# the stack of each cell, and its threads send what the cell prints.
_FOREIGN = frozenset(
    "torchmedic threading queue multiprocessing concurrent asyncio logging socket ssl subprocess selectors weakref "
    "_weakrefset importlib zipimport abc _abc typing re "
    "IPython ipykernel zmq tornado traitlets jupyter_client comm debugpy execnet pytest _pytest pluggy xdist".split()
)
_STEADY: tuple[Any, ...] = (type(iter([])), type(iter(())), type(iter("")), type(iter(range(1))), type(iter(b"")))
_NOT_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.Tensor)
_ONE_WAY: tuple[Any, ...] = (type(csv.reader([])), types.AsyncGeneratorType)  # besides iterators of C


class TooMuchInReach(Exception):
    """Not everything that the user's variables lead to could be noted."""

    def __init__(self) -> None:
        super().__init__("its variables lead to too many objects to put all of them back")


@contextlib.contextmanager
def python_left_alone(frame: FrameType, *, thorough: float = 0.0) -> Iterator[Walk]:
    """Put back what the block changes in what a frame, its callers and the user's modules hold.

    Args:
        frame: The innermost frame.
        thorough: Seconds in which everything in reach must be noted; 0 if what is nearest will do.

    Yields:
        What was noted.

    Raises:
        TooMuchInReach: Not everything could be noted; only if `thorough`.
    """
    walk = Walk(_shared_with_other_threads(), is_replay=not thorough)
    put_backs: list[PutBack] = [*settings(), *global_hooks(), context_variables()]
    roots = [*_stack_variables(frame), *(variables for _, variables in user_modules())]
    if thorough:
        if not walk.follow(roots, thorough, _MAX_THOROUGH_OBJECTS):
            raise TooMuchInReach
    else:
        walk.follow(roots)
    try:
        yield walk
    finally:
        for put_back in [*put_backs, *walk.records]:
            with contextlib.suppress(Exception):
                put_back()


def is_shared_with_other_threads(frame: FrameType) -> bool:
    """Whether other threads of the user work on a container in reach: a replay could take what they have put in."""
    if not _shared_with_other_threads():
        return False
    with python_left_alone(frame) as noted:
        return noted.is_shared


class Walk:
    """Finds what is in reach, nearest first, and notes how to put each object back."""

    def __init__(self, shared: set[int], *, is_replay: bool) -> None:
        self._is_replay = is_replay  # what recovery runs is the run's own: only its effects are noted
        self.records: list[PutBack] = []
        self.one_way: dict[int, Any] = {}  # what stands in for iterators that cannot be put back, by their identity
        self.is_shared = False  # other threads work on something in reach, which cannot be put back
        self._shared = shared
        self._seen: dict[int, Any] = {}  # with the objects, so that no identity is used twice
        self._pending: collections.deque[Any] = collections.deque()
        self._array_bytes = 0

    @property
    def changed(self) -> frozenset[int]:
        """What holds something else than before, as numbers."""
        return frozenset(number for number, each in enumerate(self.records) if getattr(each, "has_changed", False))

    def follow(self, roots: Iterable[Any], seconds: float = _MAX_SECONDS, most: int = _MAX_OBJECTS) -> bool:
        """Visit what is in reach within so many seconds and objects; returns whether that was everything."""
        self._push(roots)
        deadline = time.monotonic() + seconds
        while self._pending and len(self._seen) < most:
            if not len(self._seen) % 512 and time.monotonic() > deadline:
                break
            value = self._pending.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                with contextlib.suppress(Exception):  # an object of a class that raises when it is inspected
                    self._visit(value, type(value))
                with contextlib.suppress(Exception):  # a file that cannot tell where it is
                    self.records += of_library(value, type(value)) if self._is_replay else ()
        return not self._pending

    def guard(self, namespace: dict[str, Any]) -> None:
        """Let nobody take from iterators that cannot be put back: neither where they are kept, nor by copied names."""
        for record in self.records:
            if self.one_way and isinstance(record, Contents | Noted):
                with contextlib.suppress(Exception):
                    record.replace(self.one_way)
        namespace.update((name, self.one_way.get(id(value), value)) for name, value in list(namespace.items()))

    def _push(self, values: Iterable[Any]) -> None:
        self._pending.extend(value for value in values if type(value) not in _ATOMS and id(value) not in self._seen)

    def _visit(self, value: Any, kind: type) -> None:
        if issubclass(kind, torch.Tensor):
            self.records += of_tensor(value, kind)
            self._push(part.item for part in parts_of_tensor(value, kind))
        elif issubclass(kind, (*CONTAINERS, tuple, frozenset)):
            is_shared = id(value) in self._shared
            self.is_shared |= is_shared
            if issubclass(kind, CONTAINERS) and not is_shared:
                self.records.append(Contents(value))
            self._push(first_values(value, _MAX_FOLLOWED if length(value) > _MAX_ITEMS else _MAX_ITEMS))
            if kind.__flags__ & _HEAP_TYPE:
                self._attributes(value, kind)
        elif kind is types.FunctionType:
            if not value.__code__.co_filename.startswith(PACKAGE):
                self.records += [cell(each) for each in value.__closure__ or () if is_bound(each)]
                self._push([value.__dict__, *(part.item for part in parts(value, kind, libraries=True))])
                if value.__code__.co_filename.startswith("<"):  # made by `exec`, perhaps for no module at all
                    self._push([value.__globals__])
        elif kind is types.MethodType:
            self._push(part.item for part in parts(value, kind))
        elif issubclass(kind, type):
            if is_users(value) or issubclass(value, torch.nn.Module):
                self.records.append(class_attributes(value))
                self._push(part.item for part in parts(value, kind))
        elif kind in _STEADY:
            self.records.append(steady(value))
        elif _is_one_way(value, kind):
            self.one_way[id(value)] = IteratorStandIn(value)
        elif kind is types.ModuleType:
            if value.__dict__.get("__spec__") is None:  # it was not imported, but made by code
                self._push([value.__dict__])
        elif kind.__module__.partition(".")[0] not in _FOREIGN:
            special = told_by_itself(value, kind)
            if special is not None:
                self.records.append(special)
            elif kind.__module__ == "numpy":
                self._array(value)
            elif issubclass(kind, torch.nn.Module) or is_users(kind):
                self.records.append(class_of(value))
                self._push([kind])
            self._attributes(value, kind)

    def _attributes(self, value: Any, kind: type) -> None:
        own = own_dict(value, kind)
        if own is not None and id(own) not in self._seen:
            self._seen[id(own)] = own
            self.records.append(Contents(own))
        self.records += [slot(value, member) for _, member in members_of(kind)]
        inside = [item for _, item in attributes(value, kind)]
        self._push(inside[:_MAX_FOLLOWED] if len(inside) > _MAX_ITEMS else inside)
        if kind.__module__ == "functools":
            bounded = bounded_cache(value) if self._is_replay else None
            self._push(each for each in gc.get_referents(value) if each is not bounded)

    def _array(self, value: Any) -> None:
        size = getattr(value, "nbytes", None)
        if type(size) is int and hasattr(value, "flags") and size <= _MAX_ARRAY_BYTES:
            self._array_bytes += size
            inside = value.flags.forc or type(value.base) is type(value)  # `as_strided` may show memory of others
            if inside and value.flags.writeable and self._array_bytes <= _MAX_ALL_ARRAY_BYTES:
                self.records.append(array(value))


def _is_one_way(value: Any, kind: type) -> bool:
    if issubclass(kind, io.IOBase):
        return issubclass(kind, io.TextIOWrapper) and not value.closed and not value.writable()
    is_of_c = not kind.__flags__ & _HEAP_TYPE and hasattr(kind, "__next__")
    return is_of_c or kind in _ONE_WAY or kind.__module__ == "itertools"


def _stack_variables(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            if is_user_file(frame.f_code.co_filename):
                yield frame.f_globals
            if frame.f_locals is not frame.f_globals:  # as those of a launcher's module are
                yield from list(frame.f_locals.values())
        frame = frame.f_back


def _shared_with_other_threads() -> set[int]:
    """Containers that other threads of the user work on: their changes must not be undone."""
    found: dict[int, Any] = {}
    for thread, frame in sys._current_frames().items():
        here: FrameType | None = frame
        if thread == threading.get_ident():
            continue
        while here is not None:
            if is_user_file(here.f_code.co_filename):
                values = [*here.f_locals.values()]
                values += [here.f_globals[name] for name in here.f_code.co_names if name in here.f_globals]
                _collect(values, found, 3)
            here = here.f_back
    return set(found)


def _collect(values: Iterable[Any], found: dict[int, Any], depth: int) -> None:
    for value in values:
        kind = type(value)
        if kind in _ATOMS or id(value) in found or issubclass(kind, _NOT_SHARED):
            continue
        is_container = issubclass(kind, (*CONTAINERS, tuple))
        if issubclass(kind, CONTAINERS):
            found[id(value)] = value
        if depth and not (is_container and length(value) > _MAX_ITEMS):
            with contextlib.suppress(Exception):
                inner = first_values(value, _MAX_ITEMS) if is_container else []
                _collect([*inner, *(item for _, item in attributes(value, kind))], found, depth - 1)
