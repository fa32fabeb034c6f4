"""Messages of failed checks in CUDA kernels, copied from the child's stderr into the run folder."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchmedic.contained import contained

if TYPE_CHECKING:
    from torchmedic.detect.failures.kernel_asserts import Listener

_WRITE_INTERVAL_SECONDS = 0.1  # while thousands of GPU threads print the same


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
