"""How much memory the process holds, read rarely enough to cost nothing, now and over time, for a report to draw.

The series is lines of kind `memory` in events.jsonl:

    {"kind": "memory", "time": .., "step": 12, "phase": "backward", "rss": ..,
     "allocated": .., "reserved": .., "peak": .., "pinned": ..}

`phase` is what had just begun at that moment; the second line is there once CUDA is in use. At most one line a second,
and never more than some thousand: the longer a run turns out to be, the more time lies between two lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torchmedic.observe.memory.headroom import has_room
from torchmedic.observe.memory.host import host_memory
from torchmedic.observe.memory.small_files import bytes_of

_INTERVAL_SECONDS = 0.25  # between readings, each of which takes some microseconds
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_SERIES_INTERVAL_SECONDS = 1.0
_MAX_LINES = 1000  # after which the interval doubles
_SHORT_SHARE = 0.5  # share of all memory that there is for this process
_PRESSING, _RARELY = 3.0, 60.0  # seconds between two calls for a look: while it grows, and if it does not
_GROWN = 1.02  # times the memory at the last call for a look
_LOOK_BYTES = 256 << 20  # bytes of address space that a look may take, and that must not be the last


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
        return int(bytes_of("/proc/self/statm").split()[1]) * _PAGE
    except (IndexError, ValueError):
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


class MemorySeries:
    """Takes the readings of the gauge and writes down some of them."""

    def __init__(
        self, write: Callable[..., object], where: Callable[[], tuple[int, str]], press: Callable[[], None], most: int
    ) -> None:
        self._write = write
        self._where = where
        self._press = press  # called when memory gets short
        self._most = most
        self._due_press = 0.0
        self._pressing = _PRESSING
        self._rss_pressed = 0
        self._interval = _SERIES_INTERVAL_SECONDS
        self._due = 0.0
        self._lines = 0

    def reading(self, now: float, rss: int, device: DeviceMemory) -> None:
        if rss > _SHORT_SHARE * self._most and now >= self._due_press and has_room(_LOOK_BYTES):
            # A process that simply needs much is left in peace.
            grows = rss > _GROWN * self._rss_pressed
            self._pressing = _PRESSING if grows else min(2 * self._pressing, _RARELY)
            self._rss_pressed = rss
            self._due_press = now + self._pressing
            self._press()
        if now < self._due:
            return
        self._due = now + self._interval
        self._lines += 1
        if self._lines % _MAX_LINES == 0:
            self._interval *= 2
        step, phase = self._where()
        fields = {"allocated": device.allocated, "reserved": device.reserved, "peak": device.peak}
        if pinned := pinned_bytes():
            fields["pinned"] = pinned
        self._write("memory", step=step, phase=phase, rss=rss, **(fields if device.reserved else {}))


def most_memory() -> int:
    """Bytes that this process may have at most: all of the host, or less by a limit."""
    memory = host_memory()
    limits = (memory.total, memory.cgroup_limit, memory.address_limit, memory.data_limit, 1 << 60)
    return min(each for each in limits if each)
