"""Numbers for the things and places of a loop, which the ledger keeps instead of the things themselves."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

from torchmedic.observe.loop.events import Watched
from torchmedic.source.objects.weak_table import WeakTable
from torchmedic.source.spots import NOWHERE, Place
from torchmedic.source.user_code import outside_torch, user_frame


class Numbering:
    """Numbers of objects; holds none of them alive."""

    def __init__(self) -> None:
        self._numbers: WeakTable[int] = WeakTable()
        self._objects: dict[int, weakref.ref[Any]] = {}  # by number
        self._unheld: dict[int, int] = {}  # of objects without weak references, by identity
        self._count = 0

    def number(self, thing: Any) -> int:
        """A number for an object, which no other object ever gets."""
        found = self._numbers.get(thing) or self._unheld.get(id(thing))
        if found is not None:
            return found
        number = self._count = self._count + 1
        try:
            self._numbers[thing] = number
            self._objects[number] = weakref.ref(thing, functools.partial(self._objects.pop, number))
        except TypeError:  # a list, as a dataset: it gets a number, and is not found by it
            self._unheld[id(thing)] = number
        return number

    def number_inside(self, owner: Any, optimizers: Mapping[int, Watched]) -> int:
        """The number of an object; of the optimizer inside of a wrapper that has taken its groups, as Lightning's."""
        number = self.number(owner)
        groups = getattr(owner, "param_groups", None)
        if groups is not None and number not in optimizers:
            for watched in optimizers.values():
                if getattr(watched.optimizer, "param_groups", None) is groups:
                    return watched.number
        return number

    def thing(self, number: int) -> Any:
        """The object of a number; None where it is gone."""
        reference = self._objects.get(number)
        return reference() if reference is not None else None


class Sites:
    """Where calls come from."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], tuple[int, Place, CodeType]] = {}

    def where(self, frame: FrameType) -> tuple[int, Place]:
        """Where a call comes from. To ask a frame for its line takes long, so lines of the user's are remembered."""
        outer = outside_torch(frame)
        if outer is None:
            return 0, NOWHERE
        key = (id(outer.f_code), outer.f_lasti)
        known = self._places.get(key)
        if known is not None:
            return known[0], known[1]
        user = user_frame(outer)
        place = Place(user.f_code.co_filename, user.f_lineno) if user is not None else NOWHERE
        site = hash(key)
        if user is outer and len(self._places) < 256:
            self._places[key] = (site, place, outer.f_code)  # the code is kept, so that its identity stays its own
        return site, place
