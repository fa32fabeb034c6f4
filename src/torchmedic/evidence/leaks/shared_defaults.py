"""Whether a container is a default argument of its owner's methods: then all owners have one and the same."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType, FunctionType
from typing import Any


def is_default(identity: int, owners: Iterable[str], frames: Iterable[FrameType]) -> bool:
    """Whether it outlives its owner, since it was made with the class.

    Args:
        identity: The `id` of the container.
        owners: The names of the owner's classes.
        frames: In whose modules these are known.
    """
    wanted = set(owners)
    for variables in {id(frame.f_globals): frame.f_globals for frame in frames}.values():
        for thing in list(variables.values()):
            spaces = [vars(thing)] if isinstance(thing, type) and thing.__name__ in wanted else []
            if any(id(default) == identity for space in spaces for default in _defaults(space.values())):
                return True
    return False


def _defaults(attributes: Iterable[Any]) -> list[Any]:
    functions = [each for each in list(attributes) if isinstance(each, FunctionType)]
    return [
        default
        for function in functions
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    ]
