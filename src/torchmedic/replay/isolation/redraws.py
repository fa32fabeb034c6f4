"""The random generators that the user's own objects hold, and other numbers from them.

The state of torch's own generator is noted at every step, that of the user's is not: a step that draws its data from
one of those draws other data when it is run again. Then it is run with one seed after another, until it fails again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from torchmedic.source.user_code import is_user_file

_MAX_DEPTH = 3
_MAX_ITEMS = 64
_MAX_OBJECTS = 4096


@contextmanager
def redrawn(namespace: dict[str, Any], seed: int) -> Iterator[None]:
    """A context in which the generators that the variables lead to begin with a seed; then they are as they were."""
    undo: list[Callable[[], object]] = []
    try:
        for generator in _generators(namespace):
            undo.append(_seeded(generator, seed))
        yield
    finally:
        for put_back in undo:
            put_back()


def has_generators(namespace: dict[str, Any]) -> bool:
    return next(_generators(namespace), None) is not None


def _seeded(generator: Any, seed: int) -> Callable[[], object]:
    """Seed a generator; what puts it back."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        generator.manual_seed(seed)
        return lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        before = generator.getstate()
        generator.seed(seed)
        return lambda: generator.setstate(before)
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        known = bits.state
        bits.state = type(bits)(seed).state
        return lambda: setattr(bits, "state", known)
    old = generator.get_state()
    generator.seed(seed)
    return lambda: generator.set_state(old)


def _generators(namespace: dict[str, Any]) -> Iterator[Any]:
    """Each generator once: in variables, in the objects there, and in the variables of the user's modules."""
    values = [*namespace.values()]
    for module in list(sys.modules.values()):
        if is_user_file(getattr(module, "__file__", None) or ""):
            values += list(vars(module).values())
    seen: set[int] = set()
    pending = [(value, _MAX_DEPTH) for value in values]
    while pending and len(seen) < _MAX_OBJECTS:
        value, depth = pending.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | torch.Tensor | str | bytes | int | float):
            continue
        seen.add(id(value))
        kind = type(value)
        if issubclass(kind, random.Random | torch.Generator) or (
            kind.__module__.startswith("numpy.random") and hasattr(kind, "uniform")
        ):
            yield value
        elif depth:
            held: Any = getattr(value, "__dict__", None)
            if isinstance(value, list | tuple):
                parts = list(value[:_MAX_ITEMS])
            elif isinstance(value, dict):
                parts = list(value.values())[:_MAX_ITEMS]
            else:
                parts = list(held.values()) if isinstance(held, dict) and not callable(value) else []
            pending += [(part, depth - 1) for part in parts]
