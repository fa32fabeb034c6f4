"""What a step changes in Python: counters, lists, averages, caches, sources of random numbers, put back afterwards.

Everything that the user's variables lead to is copied one level deep, and each container that has changed in the replay
gets back what it held. Iterators cannot be set back: those that were there before are known, and not read.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import operator
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from torchmedic.replay.isolation.process_settings import settings_now
from torchmedic.replay.isolation.undo import PutBack, cell, class_attributes, container, slot, steady, told_by_itself
from torchmedic.source.user_code import PACKAGE, is_user_file

_SECONDS = 0.3  # for the walk
_OBJECTS = 300_000
_LONG = 10_000  # items of a container of which only the first are followed
_FOLLOWED = 1_000
_ARRAY_BYTES = 1 << 20
_ALL_ARRAYS = 64 << 20
_ATOMS = frozenset(
    (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size, slice, types.CodeType)
)
# Their objects belong to other threads too, or are the machinery around the step.
_FOREIGN = tuple(
    "torchmedic threading queue multiprocessing concurrent asyncio logging socket ssl subprocess selectors weakref "
    "_weakrefset importlib zipimport abc _abc typing re".split()
)
_STEADY: tuple[Any, ...] = (type(iter([])), type(iter(())), type(iter("")), type(iter(range(1))), type(iter(b"")))
_ONE_WAY: tuple[Any, ...] = (types.GeneratorType, enumerate, zip, map, filter, io.TextIOWrapper)


@contextlib.contextmanager
def python_left_alone(frame: FrameType) -> Iterator[set[int]]:
    """Put back what the block changes in what a frame, its callers and the user's modules hold.

    Yields:
        The identities of iterators that cannot be put back.
    """
    walk = _Walk(_shared_with_other_threads())
    settings = settings_now()
    walk.follow([*_stack_variables(frame), *_user_modules()])
    try:
        yield walk.one_way
    finally:
        for put_back in [*settings, *walk.records]:
            with contextlib.suppress(Exception):
                put_back()


class _Walk:
    """Finds what is in reach, nearest first, and notes how to put each of it back."""

    def __init__(self, shared: set[int]) -> None:
        self.records: list[PutBack] = []
        self.one_way: set[int] = set()
        self._shared = shared
        self._seen: dict[int, Any] = {}  # with the objects, so that no identity is used twice
        self._pending: collections.deque[Any] = collections.deque()
        self._arrays = 0

    def follow(self, roots: Iterable[Any]) -> None:
        self._push(roots)
        deadline = time.monotonic() + _SECONDS
        while self._pending and len(self._seen) < _OBJECTS:
            if not len(self._seen) % 512 and time.monotonic() > deadline:
                break
            value = self._pending.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                with contextlib.suppress(Exception):  # an object of a class that does not like to be looked at
                    self._visit(value, type(value))

    def _push(self, values: Iterable[Any]) -> None:
        self._pending.extend(value for value in values if type(value) not in _ATOMS and id(value) not in self._seen)

    def _push_some(self, values: Any) -> None:
        long = len(values) > _LONG
        items = values.values() if isinstance(values, dict) else values
        self._push([value for value, _ in zip(items, range(_FOLLOWED), strict=False)] if long else list(items))

    def _visit(self, value: Any, kind: type) -> None:
        if issubclass(kind, torch.Tensor):
            self._tensor(value)
        elif issubclass(kind, dict | list | set | collections.deque):
            if id(value) not in self._shared:
                self.records.append(container(value))
            self._push_some(value)
            if kind.__flags__ & 512:  # of a class that the user has made
                self._attributes(value, kind)
        elif kind in (tuple, frozenset):
            self._push_some(value)
        elif kind is types.FunctionType:
            self._function(value)
        elif kind is types.MethodType:
            self._push([value.__self__, value.__func__])
        elif kind is types.CellType:
            self.records.append(cell(value))
            self._push([value.cell_contents])
        elif issubclass(kind, type):
            if _is_users(value):
                self.records.append(class_attributes(value))
                self._push(vars(value).values())
        elif kind in _STEADY:
            self.records.append(steady(value))
        elif kind in _ONE_WAY or kind.__module__ == "itertools":
            self.one_way.add(id(value))
        elif kind is not types.ModuleType and not kind.__module__.startswith(_FOREIGN):
            special = told_by_itself(value, kind)
            if special is not None:
                self.records.append(special)
            elif kind.__module__ == "numpy":
                self._array(value)
            self._attributes(value, kind)

    def _attributes(self, value: Any, kind: type) -> None:
        with contextlib.suppress(AttributeError):
            own = object.__getattribute__(value, "__dict__")
            if type(own) is dict and id(own) not in self._seen:
                self._seen[id(own)] = own
                self.records.append(container(own))
                self._push_some(own)
        for base in kind.__mro__:
            for name, member in vars(base).items() if "__slots__" in vars(base) else ():
                if isinstance(member, types.MemberDescriptorType) and not name.startswith("__"):
                    self.records.append(slot(value, member))
                    with contextlib.suppress(AttributeError):
                        self._push([member.__get__(value)])
        if kind.__module__ == "functools":
            self._push(gc.get_referents(value))

    def _function(self, function: types.FunctionType) -> None:
        if function.__code__.co_filename.startswith(PACKAGE):
            return
        self._push([*(function.__closure__ or ()), *(function.__defaults__ or ())])
        self._push((function.__kwdefaults__ or {}).values())
        if function.__dict__:
            self._push([function.__dict__])

    def _tensor(self, tensor: Any) -> None:
        if tensor.is_leaf:
            wanted = tensor.requires_grad
            self.records.append(lambda: None if tensor.requires_grad is wanted else tensor.requires_grad_(wanted))

    def _array(self, array: Any) -> None:
        size = getattr(array, "nbytes", None)
        if type(size) is int and hasattr(array, "flags") and size <= _ARRAY_BYTES:
            self._arrays += size
            if array.flags.writeable and self._arrays <= _ALL_ARRAYS:
                before = array.copy()
                same = operator.methodcaller("tobytes")
                self.records.append(lambda: None if same(array) == same(before) else array.__setitem__(..., before))


def _is_users(owner: type) -> bool:
    module = sys.modules.get(owner.__module__)
    return is_user_file(getattr(module, "__file__", None) or "<unknown>")


def _stack_variables(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            if is_user_file(frame.f_code.co_filename):
                yield frame.f_globals
            yield from list(frame.f_locals.values())
        frame = frame.f_back


def _user_modules() -> Iterator[dict[str, Any]]:
    for module in list(sys.modules.values()):
        if type(module) is types.ModuleType and is_user_file(getattr(module, "__file__", None) or "<unknown>"):
            yield vars(module)


def _shared_with_other_threads() -> set[int]:
    """Containers that threads of the user's work on: what they do to them meanwhile must not be undone."""
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
        if kind in _ATOMS or id(value) in found or issubclass(kind, type | types.ModuleType | torch.Tensor):
            continue
        if issubclass(kind, dict | list | set | collections.deque):
            found[id(value)] = value
        if depth and kind not in (types.FunctionType, types.BuiltinFunctionType):
            with contextlib.suppress(Exception):
                inner = list(value.values()) if isinstance(value, dict) else value
                inner = list(vars(value).values()) if hasattr(value, "__dict__") else inner
                if isinstance(inner, list | tuple) and len(inner) <= _LONG:
                    _collect(inner, found, depth - 1)
