"""How much memory the process holds, read rarely enough to cost nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_INTERVAL_SECONDS = 0.25  # between readings, each of which takes some microseconds
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class DeviceMemory(NamedTuple):
    """Memory of the current CUDA device in bytes, as torch's allocator counts it on the host."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0  # of what was allocated


class MemoryGauge:
    """RSS of the process and bytes allocated on the current CUDA device, at most four times a second."""

    def __init__(self) -> None:
        self.due = 0.0  # when to read again
        self.rss = 0
        self.device = 0
        self.on_reading: Callable[[float, int, DeviceMemory], None] | None = None

    def read(self, now: float) -> None:
        self.due = now + _INTERVAL_SECONDS
        self.rss = resident_bytes()
        memory = device_memory()
        self.device = memory.allocated
        if self.on_reading is not None:
            self.on_reading(now, self.rss, memory)


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def device_bytes() -> int:
    return device_memory().allocated


def pinned_bytes() -> int:
    """Host memory that torch has pinned for CUDA, cached blocks included; 0 where torch does not count it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not hasattr(torch.cuda, "host_memory_stats_as_nested_dict"):
        return 0
    try:
        return int(torch.cuda.host_memory_stats_as_nested_dict()["allocated_bytes"]["current"])
    except (RuntimeError, KeyError, TypeError):
        return 0


def device_memory() -> DeviceMemory:
    torch: Any = sys.modules.get("torch")
    # Asking must never be what initialises CUDA.
    if torch is None or not torch.cuda.is_initialized():
        return DeviceMemory()
    try:
        stats = torch.cuda.memory_stats_as_nested_dict()  # to flatten it, as `memory_allocated` does, takes longer
    except RuntimeError:
        return DeviceMemory()  # an allocator of somebody else's keeps no count
    allocated = stats["allocated_bytes"]["all"]
    return DeviceMemory(allocated["current"], stats["reserved_bytes"]["all"]["current"], allocated["peak"])
