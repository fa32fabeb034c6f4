"""How an object, or the process, gets back what it holds now: each function reads it and returns the way back."""

from __future__ import annotations

import collections
import gc
import io
import operator
import os
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchmedic.source.objects.containers import items, pairs
from torchmedic.source.objects.parts import HOOK_TABLES_OF_TENSORS, attributes_of_tensor

PutBack = Callable[[], None]


class Noted:
    """What can be read and written again."""

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        is_same: Callable[[Any, Any], bool] = operator.is_,
    ) -> None:
        self._read, self._write, self._is_same = read, write, is_same
        self._before = read()

    @property
    def has_changed(self) -> bool:
        try:
            return not self._is_same(self._read(), self._before)
        except Exception:  # a variable that was deleted cannot be read
            return True

    def replace(self, stand_ins: Mapping[int, Any]) -> None:
        """Put others in the place of objects, by identity."""
        if id(self._before) in stand_ins:
            self._write(stand_ins[id(self._before)])

    def __call__(self) -> None:
        """Put back what was read."""
        if self.has_changed:
            self._write(self._before)


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

    def replace(self, stand_ins: Mapping[int, Any]) -> None:
        """Put others in the place of items, by identity."""
        if self._kind is list or issubclass(self._kind, dict):
            for place, item in pairs(self._value, len(self._before)):
                if id(item) in stand_ins:
                    self._kind.__setitem__(self._value, place, stand_ins[id(item)])

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


def cell(variable: types.CellType) -> Noted:
    return Noted(lambda: variable.cell_contents, lambda value: setattr(variable, "cell_contents", value))


def class_attributes(owner: type) -> Noted:
    def write(before: dict[str, Any]) -> None:
        now = dict(vars(owner))
        for name in now.keys() - before.keys():
            type.__delattr__(owner, name)
        for name, value in before.items():
            if now.get(name, owner) is not value:
                type.__setattr__(owner, name, value)

    return Noted(lambda: dict(vars(owner)), write, _have_same_items)


def class_of(value: Any) -> Noted:
    """The class of an object: a parametrization exchanges that of a module."""
    return Noted(lambda: type(value), lambda before: object.__setattr__(value, "__class__", before))


def _have_same_items(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(map(operator.is_, one.values(), map(other.get, one)))


def slot(value: Any, member: Any) -> Noted:
    def write(before: Any) -> None:
        member.__delete__(value) if before is _EMPTY else member.__set__(value, before)

    return Noted(lambda: _in_slot(value, member), write)


_EMPTY = object()


def _in_slot(value: Any, member: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return _EMPTY


def of_tensor(tensor: torch.Tensor, kind: type) -> Iterator[PutBack]:
    """What is put on a tensor, and stays there: whether it wants a gradient, hooks, attributes of the user's."""
    if tensor.is_leaf:
        yield Noted(lambda: tensor.requires_grad, tensor.requires_grad_)
    if kind in (torch.Tensor, torch.nn.Parameter):
        yield from (_table_of_hooks(tensor, name) for name in HOOK_TABLES_OF_TENSORS)
    yield _attributes_of_tensor(tensor)


def _table_of_hooks(tensor: torch.Tensor, name: str) -> Noted:
    def write(before: Any) -> None:
        getattr(tensor, name).clear()  # torch goes on calling what is in a table that was taken away
        setattr(tensor, name, before)

    return Noted(lambda: getattr(tensor, name), write)


def _attributes_of_tensor(tensor: torch.Tensor) -> Noted:
    def write(before: dict[str, Any]) -> None:
        tensor.__dict__.clear()
        tensor.__dict__.update(before)

    return Noted(lambda: dict(attributes_of_tensor(tensor)), write, _have_same_items)


def steady(iterator: Any) -> Noted:
    """An iterator that tells its position. An iterator at its end has forgotten what it went over."""

    def position() -> Any:
        state = iterator.__reduce__()
        return state[2] if len(state) > 2 else None

    return Noted(position, lambda before: before is None or iterator.__setstate__(before), operator.eq)


def told_by_itself(value: Any, kind: type) -> Noted | None:
    """Objects that tell their state themselves: random generators, files in memory."""
    if issubclass(kind, random.Random):
        return Noted(value.getstate, value.setstate, operator.eq)
    if issubclass(kind, torch.Generator):
        return Noted(value.get_state, value.set_state, torch.equal)
    if kind.__module__.startswith("numpy.random"):
        if hasattr(value, "bit_generator"):
            generator = value.bit_generator
            return Noted(lambda: generator.state, lambda state: setattr(generator, "state", state), _is_same_text)
        if hasattr(value, "set_state"):
            return Noted(value.get_state, value.set_state, _is_same_text)
    if issubclass(kind, io.StringIO | io.BytesIO) and not value.closed:

        def write(before: tuple[Any, int]) -> None:
            value.seek(0)
            value.truncate()
            value.write(before[0])
            value.seek(before[1])

        return Noted(lambda: (value.getvalue(), value.tell()), write, operator.eq)
    return None


def _is_same_text(one: Any, other: Any) -> bool:
    """Compare states with arrays in them."""
    return pickle.dumps(one) == pickle.dumps(other)


def array(value: Any) -> Noted:
    return Noted(value.copy, lambda before: value.__setitem__(..., before), _has_same_bytes)


def _has_same_bytes(one: Any, other: Any) -> bool:
    return bool(one.tobytes() == other.tobytes())


def random_numbers() -> Iterator[Noted]:
    """The generators of Python and NumPy that everybody shares."""
    yield Noted(random.getstate, random.setstate, operator.eq)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield Noted(numpy.random.get_state, numpy.random.set_state, _is_same_text)


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


def global_hooks() -> Iterator[Noted]:
    """The hooks of all modules and of all optimizers."""
    for owner in ("torch.nn.modules.module", "torch.optim.optimizer"):
        tables = (table for name, table in vars(sys.modules[owner]).items() if name.startswith("_global_"))
        yield from (_dict_of_hooks(table) for table in tables if isinstance(table, dict))


def _dict_of_hooks(table: dict[int, Any]) -> Noted:
    def write(before: dict[int, Any]) -> None:
        table.clear()
        table.update(before)

    return Noted(lambda: dict(table.items()), write, _have_same_items)


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return None
