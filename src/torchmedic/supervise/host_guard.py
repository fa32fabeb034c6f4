"""The host's memory while the run goes on: the last samples for the time after, and an alarm before it ends.

Once a second while there is room, at every look of the parent when it gets tight. A sample takes some hundred
microseconds, most of it for the processes of the run, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmedic import rundir
from torchmedic.contained import report_fault
from torchmedic.detect import host_memory
from torchmedic.errors import UnreadableRun
from torchmedic.memory_records import HostAlarm
from torchmedic.observe import blackbox
from torchmedic.records import HeldMemory, MemorySample
from torchmedic.supervise import cgroups
from torchmedic.supervise.host_pressure import psi

_CALM, _TIGHT = 1.0, 0.2  # seconds between samples
_NARROW = 0.7  # of the limit, from which on it is tight
_KEPT = 150
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROCESSES = 64
_WORKER = "pt_data_worker"  # what torch calls a DataLoader worker


class HostGuard:
    """Samples memory; `alarms` gives what is new, once."""

    def __init__(self, run: Path, proc: Path = Path("/proc"), groups: Path | None = None) -> None:
        self._run = run
        self._proc = proc
        self._groups = groups or cgroups.default_root()
        self._samples: deque[MemorySample] = deque(maxlen=_KEPT)
        self._swapped: tuple[float, int] | None = None
        self._raised: HostAlarm | None = None
        self._told = False
        self._broken = False

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        return tuple(self._samples)

    def look(self, pids: Iterable[int]) -> None:
        """Called a few times a second with the processes of the run."""
        now = time.monotonic()
        last = self._samples[-1] if self._samples else None
        pause = _CALM if last is None or last.share < _NARROW else _TIGHT
        if self._broken or (last is not None and now - last.time < pause):
            return
        try:
            self._samples.append(self._sample(now, pids))
            if self._raised is None and host_memory.is_alarming(self.samples):
                self._raised = self._alarm()
        except Exception as error:
            self._broken = True
            report_fault("supervise.memory", error)

    def alarms(self) -> list[HostAlarm]:
        """The alarm, when it has just been raised."""
        if self._raised is None or self._told:
            return []
        self._told = True
        return [self._raised]

    def _sample(self, now: float, pids: Iterable[int]) -> MemorySample:
        meminfo = cgroups.table(self._proc / "meminfo", "MemTotal", "MemAvailable")
        total, free = meminfo.get("MemTotal", 0) << 10, meminfo.get("MemAvailable", 0) << 10
        host = (total - free, total) if total else None
        sizes = {pid: found for pid in list(pids)[:_PROCESSES] if (found := self._sizes(pid)) is not None}
        group = self._group(sum(resident for resident, _ in sizes.values()))
        tight = group if group is not None and (host is None or group[0] / group[1] > host[0] / host[1]) else host
        shm_used, shm_size = _shm()
        pressure = psi(self._proc / "pressure" / "memory")
        return MemorySample(
            time=now,
            used=tight[0] if tight is not None else None,
            limit=tight[1] if tight is not None else None,
            bound="cgroup" if tight is not None and tight is not host else "host",
            private={pid: resident - shared for pid, (resident, shared) in sizes.items()},
            waiting=pressure.full if pressure is not None else None,
            swap_in=self._swap_in(now),
            shm_used=shm_used,
            shm_size=shm_size,
        )

    def _group(self, resident: int) -> tuple[int, int] | None:
        """What the tightest group around us holds that cannot be given back, and its limit."""
        found = []
        for folder in cgroups.folders("memory", self._proc / "self" / "cgroup", self._groups):
            limit = cgroups.memory_limit(folder)
            if limit:
                # The count of the group itself has the cache of files in it, which is given back when it is wanted.
                held = cgroups.table(f"{folder}/memory.stat", "anon", "shmem", "total_rss", "total_shmem")
                names = ("anon", "shmem") if "anon" in held else ("total_rss", "total_shmem")
                found.append((sum(held.get(name, 0) for name in names) or resident, limit))
        return max(found, key=lambda each: each[0] / each[1], default=None)

    def _sizes(self, pid: int) -> tuple[int, int] | None:
        """What a process has in memory, and how much of that is of files or shared."""
        words = (cgroups.text(self._proc / str(pid) / "statm") or "").split()
        with contextlib.suppress(ValueError, IndexError):
            return int(words[1]) * _PAGE, int(words[2]) * _PAGE
        return None

    def _swap_in(self, now: float) -> float | None:
        pages = cgroups.table(self._proc / "vmstat", "pswpin").get("pswpin")
        before, self._swapped = self._swapped, None if pages is None else (now, pages)
        if before is None or pages is None or now <= before[0]:
            return None
        return max(0, pages - before[1]) * _PAGE / (now - before[0])

    # What the processes know of themselves

    def _alarm(self) -> HostAlarm:
        growing = host_memory.grew_most(self.samples)
        own = rundir.folder_of(self._run, growing[0]) if growing is not None else None
        worker = self._worker(growing[0]) if growing is not None and own is None else None
        folder = own or next(iter(rundir.process_folders(self._run)), None)
        known = worker or folder
        moment = None
        if folder is not None:
            with contextlib.suppress(UnreadableRun):
                moment = blackbox.read(folder / rundir.BLACK_BOX).last
        return HostAlarm(
            samples=self.samples,
            seconds_left=host_memory.seconds_left(self.samples),
            growing=growing,
            trains=own is not None,
            loads=worker is not None,
            holders=holders(known) if known is not None else (),
            pinned=pinned(folder) if folder is not None else 0,
            rank=rundir.rank_of(folder) if folder is not None else 0,
            step=moment.step if moment is not None else None,
            file=moment.file if moment is not None else "",
            line=moment.line if moment is not None else 0,
        )

    def _worker(self, pid: int) -> Path | None:
        is_worker = (cgroups.text(self._proc / str(pid) / "comm") or "").startswith(_WORKER)
        return rundir.worker_folder_of(self._run, pid, is_worker=is_worker)


class _Holders(msgspec.Struct, tag="holders", tag_field="kind"):
    holders: tuple[HeldMemory, ...]


def holders(folder: Path) -> tuple[HeldMemory, ...]:
    """What held most at the last look into a process, the biggest first."""
    with contextlib.suppress(OSError):
        for line in reversed((folder / rundir.EVENTS).read_bytes().splitlines()):
            if b'"holders"' in line:
                with contextlib.suppress(msgspec.DecodeError):
                    return msgspec.json.decode(line, type=_Holders).holders
    return ()


class _Series(msgspec.Struct, tag="memory", tag_field="kind"):
    pinned: int = 0


def pinned(folder: Path) -> int:
    """Host memory that a process had pinned for its GPU when it last said so."""
    with contextlib.suppress(OSError):
        for line in reversed((folder / rundir.EVENTS).read_bytes().splitlines()):
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(line, type=_Series).pinned
    return 0


def _shm() -> tuple[int | None, int | None]:
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        return (found.f_blocks - found.f_bavail) * found.f_frsize, found.f_blocks * found.f_frsize
    return None, None
