"""Objects of the user that no variable leads to: running iterators, trainers and callbacks, cycles inside autograd.

A frame does not tell what its loops iterate over, and `MyTrainer(...).train()` stores the trainer in no variable: only
frames of the library know it, as `self`. Callbacks and iterators are searched for among all objects, which takes some
hundredths of a second: only where memory grows and no holder is found.

`backward(create_graph=True)` gives a leaf a gradient whose graph leads back to the leaf. Python's collector does not
see such a cycle, so it ends only when `.grad` is set to something else. Counted only in runs that make them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FrameType, GeneratorType
from typing import Any

import torch

from torchmedic.contained import tolerant
from torchmedic.source.objects.parts import is_users
from torchmedic.source.spots import NOWHERE, Place
from torchmedic.source.user_code import is_user_file, user_frame
from torchmedic.source.user_variables import locals_of

_MAX_ITERATORS = 32
_MAX_OTHERS = 128
_MAX_ALIKE = 3  # objects of one class; where there are more, each is one of many records
_MAX_COUNTS = 12  # each takes some hundredths of a second


def owners_of_methods(frame: FrameType | None) -> Iterator[Any]:
    """Objects of the user's classes in whose inherited methods a library is now, from the innermost frame outwards."""
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self" and not is_user_file(code.co_filename):
            owner = next((value for name, value in locals_of(frame) if name == "self"), None)
            if is_users(type(owner)):
                yield owner
        frame = frame.f_back


def unnamed_objects() -> list[Any]:
    """Iterators that run, and objects that are among the few of their class."""
    known: dict[type, str] = {}
    iterators: list[Any] = []
    others: dict[type, list[Any]] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        sort = known.get(kind)
        if sort is None:
            sort = known[kind] = _sort(kind)
        if not sort:
            continue
        if sort == "iterator":
            if len(iterators) < _MAX_ITERATORS and (kind is not GeneratorType or _is_running(thing)):
                iterators.append(thing)
        elif len(alike := others.setdefault(kind, [])) <= _MAX_ALIKE:
            alike.append(thing)
    lone = [each for alike in others.values() if len(alike) <= _MAX_ALIKE for each in alike]
    return [*iterators, *lone[:_MAX_OTHERS]]


def _sort(kind: type) -> str:
    if kind is GeneratorType:
        return "iterator"
    with tolerant:  # a class that raises when it is inspected
        if kind.__weakrefoffset__ and not issubclass(kind, type) and is_users(kind):
            return "iterator" if "__next__" in vars(kind) else "other"
    return ""


def _is_running(generator: Any) -> bool:
    frame = generator.gi_frame
    return frame is not None and is_user_file(frame.f_code.co_filename)


class GradientCycles:
    """Counts such leaves, at some looks."""

    def __init__(self) -> None:
        self.place = NOWHERE  # of the backward that makes them
        self._counted = 0

    @property
    def wanted(self) -> bool:
        return bool(self.place.line) and self._counted < _MAX_COUNTS

    def made(self, frame: FrameType) -> None:
        """A backward with `create_graph=True` writes to `.grad`."""
        user = user_frame(frame)
        if user is not None:
            self.place = Place(user.f_code.co_filename, user.f_lineno)

    def count(self) -> int:
        self._counted += 1
        found = 0
        for thing in gc.get_objects():
            kind = type(thing)
            if (kind is torch.Tensor or kind is torch.nn.Parameter) and thing.is_leaf and thing.requires_grad:
                gradient = thing.grad
                found += gradient is not None and gradient.grad_fn is not None
        return found
