"""A stderr that is a file: the child writes to it directly, and the parent reads what was appended.

So nothing comes between the child and `python train.py > log 2>&1`, where both streams share one file and its order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from torchmedic.supervise.child.tee import Hear, Stream

_CHUNK = 1 << 20
_MOST = 1 << 26  # for one look: some hundredths of a second


class Followed(Stream):
    """Reads on from where the file ended when the child was started.

    Raises:
        OSError: The file may not be read.
    """

    def __init__(self, hear: Hear) -> None:
        super().__init__()
        self._hear = hear
        # Opened anew: our own descriptor is for writing, and its position is shared with the child.
        self._file = os.open("/proc/self/fd/2", os.O_RDONLY | os.O_CLOEXEC)
        appends = fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND
        self._position = os.fstat(2).st_size if appends else os.lseek(2, 0, os.SEEK_CUR)

    def look(self) -> None:
        self._read_on(_MOST)

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        self._read_on()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._position = os.fstat(self._file).st_size  # our own words are not to be heard

    def finish(self) -> None:
        self._read_on()

    def _read_on(self, most: int | None = None) -> None:
        with contextlib.suppress(OSError):
            size = os.fstat(self._file).st_size
            if size < self._position:  # somebody has truncated it
                self._position = 0
            if most is not None:
                size = min(size, self._position + most)
            while self._position < size and (data := os.pread(self._file, _CHUNK, self._position)):
                self._position += len(data)
                self._hear(data)
