"""The end of the objects that a replay makes: `__del__` and `weakref.finalize` tell the user's code of it.

Such code counts lives down or gives a slot back. It must run while the effects of the replay are still to be put back.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchmedic.source.objects.containers import CONTAINERS, first_values
from torchmedic.source.objects.parts import attributes, is_users

_MAX_DEPTH = 2
_MAX_ITEMS = 100  # of one container


def let_go(namespace: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Forget what a replay has bound to names, where it holds an object whose class wants to know of its end."""
    for name, value in list(namespace.items()):
        if value is not known.get(name) and _holds_teller(value, _MAX_DEPTH):
            del namespace[name]


def _holds_teller(value: Any, depth: int) -> bool:
    kind = type(value)
    if hasattr(kind, "__del__"):
        return True
    if not depth or issubclass(kind, torch.Tensor | torch.nn.Module):
        return False
    if issubclass(kind, (*CONTAINERS, tuple)):
        return any(_holds_teller(each, depth - 1) for each in first_values(value, _MAX_ITEMS))
    return is_users(kind) and any(_holds_teller(each, depth - 1) for _, each in attributes(value, kind))


@contextlib.contextmanager
def ending_inside() -> Iterator[None]:
    """Let what the block made, and nobody needs, end with the block; nobody is told later of the end of the rest."""
    collects = gc.isenabled()
    gc.disable()
    is_young_ours = collects or not gc.get_freeze_count()
    if not collects and is_young_ours:
        gc.freeze()  # all that is there counts as old from now on: cycles of the user's are left alone
        gc.unfreeze()
    before = set(_finalizers())
    try:
        yield
    finally:
        if is_young_ours:
            _collect(0)
        for each in _finalizers().keys() - before:
            _finalizers().pop(each, None)
        if collects:
            gc.enable()


def _finalizers() -> dict[Any, Any]:
    return getattr(weakref.finalize, "_registry", {})


@contextlib.contextmanager
def leaving_no_garbage() -> Iterator[None]:
    """Collect what the block has left in cycles; where the user has turned the collector off, only that."""
    known = frozenset() if gc.isenabled() else frozenset(map(id, gc.get_objects()))
    try:
        yield
    finally:
        held = [each for each in gc.get_objects() if id(each) in known] if known else []  # so none of it is garbage
        _collect(2)
        held.clear()


def _collect(generation: int) -> None:
    """Collect garbage unseen by the functions that the user wants to be told of each collection."""
    told = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        gc.collect(generation)
    finally:
        gc.callbacks[:] = told
