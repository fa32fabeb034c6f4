"""Objects of the user's that no name may lead to: iterators under way, and callbacks that only a library holds.

A frame does not tell what its loops go over, and a trainer of a library that is not stored in a variable is known to
the library's frames alone. So they are looked for among all objects, which takes some hundredths of a second: only
where memory grows and nobody is seen to hold it.
"""

from __future__ import annotations

import contextlib
import gc
from types import GeneratorType
from typing import Any

from torchmedic.source.objects.parts import is_users
from torchmedic.source.user_code import is_user_file

_MOST = 32  # iterators
_LONE = 128  # other objects
_FEW = 3  # objects of one class; where there are more, each is one of many records


def unnamed_objects() -> list[Any]:
    """At most so many."""
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
            if len(iterators) < _MOST and (kind is not GeneratorType or _is_running(thing)):
                iterators.append(thing)
        elif len(alike := others.setdefault(kind, [])) <= _FEW:
            alike.append(thing)
    lone = [each for alike in others.values() if len(alike) <= _FEW for each in alike]
    return [*iterators, *lone[:_LONE]]


def _sort(kind: type) -> str:
    if kind is GeneratorType:
        return "iterator"
    with contextlib.suppress(Exception):  # a class that does not like to be looked at
        if kind.__weakrefoffset__ and not issubclass(kind, type) and is_users(kind):
            return "iterator" if "__next__" in vars(kind) else "other"
    return ""


def _is_running(generator: Any) -> bool:
    frame = generator.gi_frame
    return frame is not None and is_user_file(frame.f_code.co_filename)
