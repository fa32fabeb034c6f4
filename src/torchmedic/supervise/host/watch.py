"""What the parent keeps an eye on while the run goes on, because it cannot be seen afterwards.

How a process that is not our child has ended, when the kernel last killed for memory, and how full /dev/shm was: each
is gone a moment after a death. A look takes some tens of microseconds, four times a second. The counters of kills are
read less often: they only rise, and one that was read some seconds before the end is as good as any.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import deque
from pathlib import Path

import msgspec

from torchmedic.runfolder import files
from torchmedic.supervise.folder_news import News
from torchmedic.supervise.gpu.gpu_health import GpuWatch
from torchmedic.supervise.host import postmortem
from torchmedic.supervise.host.memory_guard import HostGuard

_WINDOW = 10.0  # seconds before the end that belong to it: a DataLoader may take five to notice a dead worker
_INTERVAL = 0.2
_COUNTING = 2.0  # seconds between two readings of the counters
_MOST = 512  # processes followed at the same time


class Sight(msgspec.Struct, frozen=True):
    time: float
    oom_kills: int | None
    limit_hits: int | None
    host_oom_kills: int | None
    shm_free: int | None


class Vigil:
    """Looks now and then, and remembers the last seconds."""

    def __init__(self, run: Path, rank: int | None = None) -> None:
        self._run = run
        self._gpus = GpuWatch(run, rank)
        self.guard = HostGuard(run)
        self.started = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
        self._news = News()
        self._stacks = run / files.STACKS
        self._pids: set[int] = set()
        self._handles: dict[int, int] = {}
        self._ended: dict[int, int | None] = {}
        self._sights: deque[Sight] = deque([_look()])
        self._counted = self._sights[0].time

    def look(self) -> None:
        now = time.monotonic()
        if now - self._sights[-1].time < _INTERVAL:
            return
        if now - self._counted < _COUNTING:
            sight = msgspec.structs.replace(self._sights[-1], time=now, shm_free=postmortem.shm_free())
        else:
            sight = _look()
            self._counted = now
        self._sights.append(sight)
        while len(self._sights) > 2 and self._sights[1].time < now - _WINDOW:
            self._sights.popleft()
        self._follow()

    def look_closely_at_gpus(self) -> None:
        self._gpus.look_closely()

    def last_look(self) -> None:
        """The child has ended: see what it left."""
        self._sights.append(_look())
        self._news = News()
        self._gpus.last_look()
        self._follow()
        for pid in list(self._handles):
            self._let_go(pid)

    @property
    def ended(self) -> dict[int, int]:
        """Wait statuses, as Popen gives them, of processes that were not our children; old kernels tell none."""
        return {pid: status for pid, status in self._ended.items() if status is not None}

    @property
    def oom_kills(self) -> int | None:
        return _rise([sight.oom_kills for sight in self._sights])

    @property
    def limit_hits(self) -> int | None:
        return _rise([sight.limit_hits for sight in self._sights])

    @property
    def host_oom_kills(self) -> int | None:
        return _rise([sight.host_oom_kills for sight in self._sights])

    @property
    def shm_low(self) -> int | None:
        return min((sight.shm_free for sight in self._sights if sight.shm_free is not None), default=None)

    def _follow(self) -> None:
        if self._news.may_be_in(self._stacks):
            self._pids = set(files.stack_files(self._run))
        known = self._pids
        self._gpus.look(known)
        self.guard.look(known)
        for pid in known - self._handles.keys() - self._ended.keys():
            if len(self._handles) < _MOST and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):
                    self._handles[pid] = os.pidfd_open(pid)
        for pid in [pid for pid in self._handles if not os.path.exists(f"/proc/{pid}")]:
            self._let_go(pid)

    def _let_go(self, pid: int) -> None:
        handle = self._handles.pop(pid)
        self._ended[pid] = exit_status(handle)
        os.close(handle)


def _look() -> Sight:
    limits = postmortem.memory_limits()
    return Sight(time.monotonic(), limits.oom_kills, limits.hits, postmortem.host_oom_kills(), postmortem.shm_free())


def _rise(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return known[-1] - known[0] if known else None


# linux/pidfd.h, since 6.13 and with the exit code since 6.15: mask, cgroup, eleven ids, exit code.
_INFO = struct.Struct("<QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


def exit_status(handle: int) -> int | None:
    """The wait status of an ended process by its pidfd, where the kernel tells it to others than its parent."""
    import fcntl

    buffer = bytearray(_INFO.size)
    struct.pack_into("<Q", buffer, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(handle, _GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, code = _INFO.unpack(buffer)
    return int(os.waitstatus_to_exitcode(code)) if mask & _INFO_EXIT else None
