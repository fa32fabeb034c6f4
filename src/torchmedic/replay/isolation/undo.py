"""How an object, or the process, gets back what it holds now: each function reads it and returns the way back."""

from __future__ import annotations

import collections
import gc
import io
import operator
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from torchmedic.source.objects.containers import items

PutBack = Callable[[], None]


class Contents:
    """What a dictionary, list, set or deque holds, read and filled past the methods of its class."""

    def __init__(self, value: Any) -> None:
        self._value = value
        kinds = (collections.OrderedDict, dict, list, set, collections.deque)
        self._kind: Any = next(kind for kind in kinds if isinstance(value, kind))
        self._before = self._items()

    def _items(self) -> list[Any]:
        if issubclass(self._kind, dict):
            return [*self._kind.keys(self._value), *self._kind.values(self._value)]
        return [item for _, item in items(self._value)]

    @property
    def has_changed(self) -> bool:
        now = self._items()
        return len(now) != len(self._before) or not all(map(operator.is_, now, self._before))

    def __call__(self) -> None:
        """Put back what it held."""
        if not self.has_changed:
            return
        value, before, kind = self._value, self._before, self._kind
        if kind is list:
            list.__setitem__(value, slice(None), before)
            return
        kind.clear(value)
        if issubclass(kind, dict):
            for key, item in zip(before[: len(before) // 2], before[len(before) // 2 :], strict=True):
                kind.__setitem__(value, key, item)
        else:
            (set.update if kind is set else collections.deque.extend)(value, before)


def is_bound(variable: types.CellType) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        variable.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def cell(variable: types.CellType) -> PutBack:
    before = variable.cell_contents

    def put_back() -> None:
        variable.cell_contents = before

    return put_back


def class_attributes(owner: type) -> PutBack:
    before = dict(vars(owner))

    def put_back() -> None:
        now = dict(vars(owner))
        for name in now.keys() - before.keys():
            type.__delattr__(owner, name)
        for name, value in before.items():
            if now.get(name, owner) is not value:
                type.__setattr__(owner, name, value)

    return put_back


def slot(value: Any, member: Any) -> PutBack:
    try:
        before = member.__get__(value)
    except AttributeError:
        return lambda: member.__delete__(value)
    return lambda: member.__set__(value, before)


def steady(iterator: Any) -> PutBack:
    """An iterator that tells its position. An iterator at its end has forgotten what it went over."""
    state = iterator.__reduce__()
    return (lambda: iterator.__setstate__(state[2])) if len(state) > 2 else (lambda: None)


def told_by_itself(value: Any, kind: type) -> PutBack | None:
    """Objects that tell their state themselves: random generators, files in memory."""
    if issubclass(kind, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    if issubclass(kind, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if kind.__module__.startswith("numpy.random"):
        if hasattr(value, "bit_generator"):
            generator, inner = value.bit_generator, value.bit_generator.state
            return lambda: setattr(generator, "state", inner)
        if hasattr(value, "set_state"):
            legacy = value.get_state()
            return lambda: value.set_state(legacy)
    if issubclass(kind, io.StringIO | io.BytesIO) and not value.closed:
        text, position = value.getvalue(), value.tell()

        def put_back() -> None:
            if value.tell() != position or value.getvalue() != text:
                value.seek(0)
                value.truncate()
                value.write(text)
                value.seek(position)

        return put_back
    return None


def settings() -> list[PutBack]:
    """Settings of the process and of torch that a step may change: environment, folder, threads, flags."""
    environment, folder, path = dict(os.environ), _working_folder(), list(sys.path)
    collects = gc.isenabled()
    matmul = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in ("benchmark", "deterministic", "enabled")}

    def put_back() -> None:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if folder is not None and _working_folder() != folder:
            os.chdir(folder)
        if sys.path != path:
            sys.path[:] = path
        if gc.isenabled() != collects:
            (gc.enable if collects else gc.disable)()

    def put_back_torch() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_float32_matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
        for name, value in cudnn.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)

    return [put_back, put_back_torch]


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return None
