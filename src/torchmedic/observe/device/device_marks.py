"""Marks that the device itself makes in host memory when it gets there: how far it had come when it died.

The host is ahead of its device, so its own line says little. At a few points of a step a tiny write is put on the
stream: the device stores a number in pinned memory once everything before it is done. After a fault nothing on the
device can be asked any more, but this memory can.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchmedic.observe.device.driver_calls import DriverCalls, driver_calls

_MAX_MARKS = 512  # that are remembered: more than the host can be ahead of the device
_MAX_NUMBER = 1 << 30


class Mark(NamedTuple):
    """A point of the run: what had been asked of the device before it."""

    number: int
    what: str  # a phase that began, or the path of a module
    step: int
    file: str
    line: int


class DeviceMarks:
    """Writes marks to the stream, and tells the last one that the device made."""

    def __init__(self) -> None:
        self.on = True
        self._number = 0
        self._log: list[Mark | None] = [None] * _MAX_MARKS
        self._words: Any = None  # pinned; the first holds the last number
        self._address = 0
        self._driver: DriverCalls | None = None

    def mark(self, what: str, step: int, file: str, line: int) -> None:
        """Everything that was launched so far comes before this."""
        if not self.on or (self._driver is None and not self._begin()):
            return
        number = self._number = (self._number + 1) % _MAX_NUMBER
        self._log[number % _MAX_MARKS] = Mark(number, what, step, file, line)
        assert self._driver is not None
        # Where the driver does not take it (a capture, a card that cannot), no marks are better than wrong ones.
        self.on = self._driver.mark(self._address, number)

    def last(self) -> tuple[Mark | None, Mark | None]:
        """The last mark that the device made, and the first that it did not."""
        if self._words is None:
            return None, None
        made = int(self._words[0])
        return self._at(made), self._at(made + 1)

    def _at(self, number: int) -> Mark | None:
        found = self._log[number % _MAX_MARKS]
        return found if found is not None and found.number == number else None

    def _begin(self) -> bool:
        if not torch.cuda.is_initialized():
            return False
        self.on = False  # until everything is there
        self._words = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._address = self._words.data_ptr()
        self._driver = driver_calls()
        self.on = self._driver is not None
        return self.on
