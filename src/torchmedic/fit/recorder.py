"""Births and deaths of device memory: every storage on the pretended device, with its line and kind."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torchmedic.records.fit import KINDS, Kind, Line, Trace

_CODES = {kind: number for number, kind in enumerate(KINDS)}
_MIN_WIDE_BYTES = 1 << 20  # storages from this size on have their last dimension noted


class Recorder:
    """Follows storages until they die. Holds no tensor and no storage."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # number and reference, by the identity of a storage
        self._lines: dict[Line, int] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._alive

    def born(self, tensor: torch.Tensor, kind: Kind, place: Line, user: Line) -> None:
        """Count the storage of a tensor until it dies; nothing if it is known."""
        storage = tensor.untyped_storage()
        key = id(storage)  # the object stays the same as long as the storage lives
        if key in self._alive:
            return
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        wide = tensor.shape[-1] if nbytes >= _MIN_WIDE_BYTES and tensor.dim() else 0
        number = self._add(nbytes, kind, place, user, wide)
        events = self.trace.events

        def died(_: Any) -> None:
            events.append(~number)
            self._alive.pop(key, None)

        self._alive[key] = (number, weakref.ref(storage, died))

    def mark(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Set the kind of a known storage."""
        found = self._alive.get(id(tensor.untyped_storage()))
        if found is not None:
            self.trace.kinds[found[0]] = _CODES[kind]

    def held(self, nbytes: int, kind: Kind, place: Line, user: Line) -> None:
        """Count memory that is never freed."""
        self._add(nbytes, kind, place, user, 0)

    def passing(self, nbytes: int, kind: Kind, place: Line, user: Line) -> None:
        """Count memory that an operation takes and frees again."""
        number = self._add(nbytes, kind, place, user, 0)
        self.trace.events.append(~number)

    def _add(self, nbytes: int, kind: Kind, place: Line, user: Line, wide: int) -> int:
        trace = self.trace
        number = len(trace.sizes)
        trace.sizes.append(nbytes)
        trace.kinds.append(_CODES[kind])
        trace.places.append(self._line(place))
        trace.user_places.append(self._line(user))
        trace.widths.append(wide)
        trace.events.append(number)
        return number

    def _line(self, line: Line) -> int:
        number = self._lines.get(line)
        if number is None:
            number = self._lines[line] = len(self.trace.lines)
            self.trace.lines.append(line)
        return number
