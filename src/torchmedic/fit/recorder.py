"""Births and deaths of device memory: every storage on the pretended device, with its line and kind."""

from __future__ import annotations

import torch

from torchmedic.records.fit import KINDS, Kind, Line, Trace
from torchmedic.replay.fake.births import Births, Course

_CODES = {kind: number for number, kind in enumerate(KINDS)}
_MIN_WIDE_BYTES = 1 << 20  # storages from this size on have their last dimension noted


class Recorder:
    """Writes the course of memory into a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._births = Births(Course(trace.events, trace.sizes))
        self._lines: dict[Line, int] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        return self._births.number_of(tensor) is not None

    def born(self, tensor: torch.Tensor, kind: Kind, place: Line, user: Line) -> None:
        """Count the storage of a tensor until it dies; nothing if it is known."""
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes and not self.knows(tensor):
            self._births.follow(tensor, nbytes)
            self._note(kind, place, user, tensor.shape[-1] if nbytes >= _MIN_WIDE_BYTES and tensor.dim() else 0)

    def mark(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Set the kind of a known storage."""
        number = self._births.number_of(tensor)
        if number is not None:
            self.trace.kinds[number] = _CODES[kind]

    def held(self, nbytes: int, kind: Kind, place: Line, user: Line) -> int:
        """Count memory that is never freed; returns its number."""
        self._note(kind, place, user)
        return self._births.add(nbytes)

    def passing(self, nbytes: int, kind: Kind, place: Line, user: Line) -> None:
        """Count memory that an operation takes and frees again."""
        self.trace.events.append(~self.held(nbytes, kind, place, user))

    def _note(self, kind: Kind, place: Line, user: Line, width: int = 0) -> None:
        trace = self.trace
        trace.kinds.append(_CODES[kind])
        trace.places.append(self._line(place))
        trace.user_places.append(self._line(user))
        trace.widths.append(width)

    def _line(self, line: Line) -> int:
        number = self._lines.get(line)
        if number is None:
            number = self._lines[line] = len(self.trace.lines)
            self.trace.lines.append(line)
        return number
