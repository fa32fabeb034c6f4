"""Facts that the parent records during the run because they are gone a moment after a death.

These are the wait status of a process that is not our child, out-of-memory kills, and the free space in /dev/shm. One
look takes some tens of microseconds, up to five times a second. The counters of kills only rise, so they are read less
often.
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
from torchmedic.supervise.folder_news import FolderNews
from torchmedic.supervise.gpu.gpu_health import GpuWatch
from torchmedic.supervise.host import postmortem
from torchmedic.supervise.host.host_pressure import shared_memory
from torchmedic.supervise.host.memory_guard import MemoryGuard

_WINDOW_SECONDS = 10.0  # before the end: a DataLoader may take five seconds to notice a dead worker
_INTERVAL_SECONDS = 0.2
_COUNTER_INTERVAL_SECONDS = 5.0
_GROUP_INTERVAL_SECONDS = 60.0  # a process hardly ever moves to another cgroup
_MAX_PROCESSES = 512  # followed at the same time


class HostSample(msgspec.Struct, frozen=True):
    time: float
    oom_kills: int | None
    limit_hits: int | None
    host_oom_kills: int | None
    shm_free: int | None


class HostWatch:
    """Samples the host and the processes of the run, and keeps the samples of the last seconds."""

    def __init__(self, run: Path, rank: int | None = None) -> None:
        self._run = run
        self._gpus = GpuWatch(run, rank)
        self.guard = MemoryGuard(run)
        self.started = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
        self._news = FolderNews()
        self._stacks = run / files.STACKS
        self._pids: set[int] = set()
        self._handles: dict[int, int] = {}
        self._ended: dict[int, int | None] = {}
        self._group: postmortem.MemoryGroup | None = None
        self._group_due = 0.0
        self._samples: deque[HostSample] = deque([self._sample()])
        self._counted = self._samples[0].time

    def look(self) -> None:
        now = time.monotonic()
        if now - self._samples[-1].time < _INTERVAL_SECONDS:
            return
        if now - self._counted < _COUNTER_INTERVAL_SECONDS:
            sample = msgspec.structs.replace(self._samples[-1], time=now, shm_free=_shm_free())
        else:
            sample = self._sample()
            self._counted = now
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].time < now - _WINDOW_SECONDS:
            self._samples.popleft()
        self._follow()

    @property
    def pause(self) -> float:
        """Seconds until the next look: less where memory is tight or new to the run, more where there is much."""
        return self.guard.pause

    def look_closely_at_gpus(self) -> None:
        self._gpus.look_closely()

    def last_look(self) -> None:
        """Take a last sample after the child has ended."""
        self._group_due = 0.0
        self._samples.append(self._sample())
        self._news = FolderNews()
        self._gpus.last_look()
        self._follow()
        for pid in list(self._handles):
            self._close(pid)

    @property
    def ended(self) -> dict[int, int]:
        """Wait statuses, as Popen gives them, of processes that were not our children; empty on old kernels."""
        return {pid: status for pid, status in self._ended.items() if status is not None}

    @property
    def oom_kills(self) -> int | None:
        return _rise([sample.oom_kills for sample in self._samples])

    @property
    def limit_hits(self) -> int | None:
        return _rise([sample.limit_hits for sample in self._samples])

    @property
    def host_oom_kills(self) -> int | None:
        return _rise([sample.host_oom_kills for sample in self._samples])

    @property
    def shm_low(self) -> int | None:
        return min((sample.shm_free for sample in self._samples if sample.shm_free is not None), default=None)

    def _sample(self) -> HostSample:
        now = time.monotonic()
        if now >= self._group_due:
            self._group_due = now + _GROUP_INTERVAL_SECONDS
            self._group = postmortem.memory_group()
        kills, hits = (self._group.oom_kills(), self._group.hits()) if self._group is not None else (None, None)
        return HostSample(now, kills, hits, postmortem.host_oom_kills(), _shm_free())

    def _follow(self) -> None:
        if self._news.may_have_changed(self._stacks):
            self._pids = set(files.stack_files(self._run))
        known = self._pids
        self._gpus.look(known)
        self.guard.look(known)
        for pid in known - self._handles.keys() - self._ended.keys():
            if len(self._handles) < _MAX_PROCESSES and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):
                    self._handles[pid] = os.pidfd_open(pid)
        for pid in [pid for pid in self._handles if not os.path.exists(f"/proc/{pid}")]:
            self._close(pid)

    def _close(self, pid: int) -> None:
        handle = self._handles.pop(pid)
        self._ended[pid] = exit_status(handle)
        os.close(handle)


def _shm_free() -> int | None:
    shared = shared_memory()
    return None if shared is None else shared[1]


def _rise(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return known[-1] - known[0] if known else None


# linux/pidfd.h, since 6.13 and with the exit code since 6.15: mask, cgroup, eleven ids, exit code.
_INFO = struct.Struct("<QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


def exit_status(handle: int) -> int | None:
    """The wait status of an ended process from its pidfd; None where the kernel tells only the parent."""
    import fcntl

    buffer = bytearray(_INFO.size)
    struct.pack_into("<Q", buffer, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(handle, _GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, code = _INFO.unpack(buffer)
    return int(os.waitstatus_to_exitcode(code)) if mask & _INFO_EXIT else None
