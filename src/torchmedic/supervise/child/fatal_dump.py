"""Stacks that a faulthandler of the user's own writes to stderr when the process dies.

There is one faulthandler per process. Where the user has enabled it, the stacks go to stderr and not into the run
folder. The parent process hears stderr and takes them from there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from torchmedic.contained import contained
from torchmedic.runfolder import files

_BEGIN = b"Fatal Python error: "
_MAX_DUMP_BYTES = 1 << 18


class FatalDump:
    """Keeps what follows the last `Fatal Python error` on stderr."""

    def __init__(self) -> None:
        self._tail = b""
        self._dump: bytearray | None = None

    @contained("supervise.fatal_dump")
    def feed(self, data: bytes) -> None:
        if self._dump is None or _BEGIN in data:
            joined = self._tail + data
            at = joined.rfind(_BEGIN)
            if at >= 0 and (at == 0 or joined[at - 1 : at] == b"\n"):
                self._dump = bytearray(joined[at : at + _MAX_DUMP_BYTES])
                self._tail = b""
                return
            self._tail = joined[-len(_BEGIN) :]
        if self._dump is not None:
            self._dump += data[: _MAX_DUMP_BYTES - len(self._dump)]

    @contained("supervise.fatal_dump")
    def save(self, run: Path, pid: int) -> None:
        """Put the stacks where those of torchmedic's own faulthandler would be, unless that has written some."""
        path = files.stack_files(run).get(pid)
        if self._dump is None or path is None or path.stat().st_size:
            return
        with contextlib.suppress(OSError):
            files.write_atomically(path, bytes(self._dump))
