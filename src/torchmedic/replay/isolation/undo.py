"""How one object gets back what it holds now: each function looks at it and gives the way back."""

from __future__ import annotations

import collections
import io
import operator
import random
import types
from collections.abc import Callable
from typing import Any

import torch

PutBack = Callable[[], None]


def container(value: Any) -> PutBack:
    """A dictionary, list, set or deque. Its class may have other ideas of assignment, so Python's own are used."""
    if isinstance(value, dict):
        kind: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        keys, items = list(kind.keys(value)), list(kind.values(value))

        def put_back() -> None:
            if not (_same(list(kind.keys(value)), keys) and _same(list(kind.values(value)), items)):
                kind.clear(value)
                for key, item in zip(keys, items, strict=True):
                    kind.__setitem__(value, key, item)

        return put_back
    before = list(value)
    if isinstance(value, list):
        return lambda: None if _same(value, before) else list.__setitem__(value, slice(None), before)
    kind = set if isinstance(value, set) else collections.deque
    fill = set.update if isinstance(value, set) else collections.deque.extend

    def refill() -> None:
        if not _same(list(value), before):
            kind.clear(value)
            fill(value, before)

    return refill


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


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
    """An iterator that says where it is. One that has come to its end has forgotten what it went over."""
    state = iterator.__reduce__()
    return (lambda: iterator.__setstate__(state[2])) if len(state) > 2 else (lambda: None)


def told_by_itself(value: Any, kind: type) -> PutBack | None:
    """Objects that say their state themselves."""
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
