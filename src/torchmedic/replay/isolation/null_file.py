"""A file that keeps nothing: what a replay opens to write to. It has a length and a position like any other."""

from __future__ import annotations

import io
import os
from typing import Any


class Sink(io.RawIOBase):
    """Takes what it is given and forgets it."""

    def __init__(self, name: Any, mode: str) -> None:
        self.name = name
        self.mode = mode
        self._position = self._length = 0
        self._descriptor: int | None = None

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return "+" in self.mode

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self._position += written
        self._length = max(self._length, self._position)
        return written

    def readinto(self, buffer: Any) -> int:
        return 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self._length = self._position if size is None else size
        return self._length

    def fileno(self) -> int:
        """A descriptor that leads nowhere, for calls such as `os.fsync`."""
        if self._descriptor is None:
            self._descriptor = os.open(os.devnull, os.O_RDWR)
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        super().close()


def opened(
    name: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
) -> Any:
    """What `open` would give for a mode that writes."""
    sink = Sink(name, mode)
    if "b" in mode and buffering == 0:
        return sink
    buffered: Any = io.BufferedRandom(sink) if "+" in mode else io.BufferedWriter(sink)
    if "b" in mode:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text
