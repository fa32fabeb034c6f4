"""Generators and iterators of the user's that are under way. Often nothing but the loop that runs them holds them.

No name leads there, and a frame does not tell what its loops go over. So they are looked for among all objects, which
takes some hundredths of a second: only where memory grows and nobody is seen to hold it.
"""

from __future__ import annotations

import gc
from types import GeneratorType
from typing import Any

from torchmedic.observe.frames import is_user_file
from torchmedic.observe.insides import is_users

_MOST = 32


def running_iterators() -> list[Any]:
    """At most some dozens."""
    known: dict[type, bool] = {}
    found: list[Any] = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is GeneratorType:
            frame = thing.gi_frame
            wanted = frame is not None and is_user_file(frame.f_code.co_filename)
        else:
            wanted = known.get(kind, False)
            if kind not in known:
                wanted = known[kind] = "__next__" in vars(kind) and is_users(kind)
        if wanted and (kind is GeneratorType or kind.__weakrefoffset__):
            found.append(thing)
            if len(found) >= _MOST:
                break
    return found
