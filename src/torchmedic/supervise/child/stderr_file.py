"""A stderr that is left alone, and a stderr that is a file: the child writes to it directly, the parent reads along.

So nothing comes between the child and `python train.py > log 2>&1`, where both streams share one file and its order.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Callable, Iterator

Hear = Callable[[bytes], object]

TICK_SECONDS = 0.25
_CHUNK_BYTES = 1 << 20
_MAX_LOOK_BYTES = 1 << 26  # takes some hundredths of a second


class Stream:
    """A stderr that is left alone."""

    pause = math.inf  # seconds until the next look, at most

    def __init__(self) -> None:
        self.given: dict[str, int] = {}  # streams that Popen gives to the child instead of our own

    def start(self) -> None:
        """Called when the child has been started."""

    def look(self) -> None:
        """Called a few times a second."""

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Entered around our own messages: they come after what the child has written so far."""
        yield

    def finish(self) -> None:
        """Pass on all that the child has left, after its end."""

    def let_go(self) -> None:
        """Called when torchmedic is about to exit."""


class StderrFile(Stream):
    """Reads the file from its end at the start of the child. Raises OSError if the file may not be read."""

    pause = 1.0  # `words_of`, in a process that dies of a GPU fault, waits longer than this

    def __init__(self, hear: Hear) -> None:
        super().__init__()
        self._hear = hear
        # A new descriptor: our own is for writing, and shares its position with the child.
        self._file = os.open("/proc/self/fd/2", os.O_RDONLY | os.O_CLOEXEC)
        appends = fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND
        self._position = os.fstat(2).st_size if appends else os.lseek(2, 0, os.SEEK_CUR)

    def look(self) -> None:
        self._read_on(_MAX_LOOK_BYTES)

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        self._read_on()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._position = os.fstat(self._file).st_size  # skip our own messages

    def finish(self) -> None:
        self._read_on()

    def _read_on(self, most: int | None = None) -> None:
        with contextlib.suppress(OSError):
            size = os.fstat(self._file).st_size
            if size < self._position:  # the file was truncated
                self._position = 0
            if most is not None:
                size = min(size, self._position + most)
            while self._position < size and (data := os.pread(self._file, _CHUNK_BYTES, self._position)):
                self._position += len(data)
                self._hear(data)
