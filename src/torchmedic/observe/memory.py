"""How much memory the process holds, read rarely enough to cost nothing."""

from __future__ import annotations

import os
import sys
from typing import Any

_INTERVAL = 0.25  # seconds between readings: a few microseconds, four times a second
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class MemoryGauge:
    """RSS of the process and bytes allocated on the current CUDA device, at most four times a second."""

    def __init__(self) -> None:
        self.due = 0.0  # when to read again
        self.rss = 0
        self.device = 0

    def read(self, now: float) -> None:
        self.due = now + _INTERVAL
        self.rss = _resident_bytes()
        self.device = _device_bytes()


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _device_bytes() -> int:
    torch: Any = sys.modules.get("torch")
    # Asking must never be what initialises CUDA.
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated())
