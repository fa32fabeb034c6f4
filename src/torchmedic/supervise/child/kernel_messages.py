"""What the child's stderr says of its death, copied into the run folder: failed checks in CUDA kernels, and stacks.

There is one faulthandler per process. Where the user has enabled it, the stacks go to stderr and not into the run
folder. The parent process hears stderr and takes them from there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchmedic.contained import contained
from torchmedic.runfolder import files

if TYPE_CHECKING:
    from torchmedic.detect.failures.kernel_asserts import Listener

_WRITE_INTERVAL_SECONDS = 0.1  # while thousands of GPU threads print the same
_BEGIN = b"Fatal Python error: "
_MAX_DUMP_BYTES = 1 << 18


class KernelMessages:
    """Collects the messages and writes new ones to the run folder, where the dying child reads them."""

    def __init__(self, run: Path, rank: int | None = None) -> None:
        self._run = run
        self._rank = rank
        self._listener: Listener | None = None
        self._distinct = 0
        self._written = 0.0
        self._unwritten = False
        self._lock = threading.Lock()

    @contained("supervise.words")
    def feed(self, data: bytes) -> None:
        with self._lock:
            if self._listener is None:
                from torchmedic.detect.failures.kernel_asserts import Listener

                self._listener = Listener()
            if self._listener.feed(data):
                self._unwritten = True
                distinct = self._listener.distinct
                if distinct > self._distinct or time.monotonic() - self._written > _WRITE_INTERVAL_SECONDS:
                    self._distinct = distinct
                    self._write()

    @contained("supervise.words")
    def flush(self) -> None:
        """Write pending messages. Called a few times a second and at the end."""
        with self._lock:
            if self._unwritten:
                self._write()

    def _write(self) -> None:
        from torchmedic.runfolder import gpu

        if self._listener is not None:
            with contextlib.suppress(OSError):  # a full disk is reported elsewhere
                gpu.write_kernel_words(self._run, self._listener.text(), self._rank)
        self._written = time.monotonic()
        self._unwritten = False


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
