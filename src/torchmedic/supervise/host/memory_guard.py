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

from torchmedic.contained import report_fault
from torchmedic.detect.trends import host_memory
from torchmedic.errors import UnreadableRun
from torchmedic.observe.step import blackbox
from torchmedic.records.memory import HeldMemory, HostAlarm, MemorySample
from torchmedic.runfolder import files, layout, questions
from torchmedic.supervise.host import cgroups
from torchmedic.supervise.host.host_pressure import psi

_CALM, _TIGHT = 1.0, 0.2  # seconds between samples
_YOUNG, _SOON = 20.0, 0.4  # of a young run there may be nothing yet to see the growth by
_NARROW = 0.7  # of the limit, from which on it is tight
_GROWN = 0.05  # of the limit, by which a process must have grown to be asked what it holds, and asked again,
_ASKING = 0.4  # seconds between two such questions,
_QUESTIONS = 10  # how many there are in a run,
_ROOM = 128 << 20  # and bytes that must be left: to look takes some, too
_PATIENCE = 0.6  # seconds that an alarm may wait for the answer
_KEPT = 150
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROCESSES = 64
_ALIKE = 0.5  # of the growth of another process
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
        self._began = time.monotonic()
        self._raised_at = 0.0
        self._asked: dict[int, tuple[float, int]] = {}  # when a process was last asked what it holds, and its size
        self._questions = 0

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        return tuple(self._samples)

    def look(self, pids: Iterable[int]) -> None:
        """Called a few times a second with the processes of the run."""
        now = time.monotonic()
        last = self._samples[-1] if self._samples else None
        tight = last is not None and (last.share >= _NARROW or host_memory.is_rushing(self.samples))
        pause = _TIGHT if tight else _CALM if now - self._began > _YOUNG else _SOON
        if self._broken or (last is not None and now - last.time < pause):
            return
        try:
            self._samples.append(self._sample(now, pids))
            if tight and not self._told:
                self._ask(now)
            if self._raised is None and host_memory.is_alarming(self.samples):
                self._raised, self._raised_at = self._alarm(), now
        except Exception as error:
            self._broken = True
            report_fault("supervise.memory", error)

    def alarms(self) -> list[HostAlarm]:
        """The alarm, when it has just been raised."""
        if self._raised is None or self._told:
            return []
        if not self._raised.holders:
            if self._is_answer_due():
                return []
            self._raised = msgspec.structs.replace(self._raised, holders=self._alarm().holders)
        self._told = True
        return [self._raised]

    def _ask(self, now: float) -> None:
        """Have the process that grows say what it holds, before there is no time left for it."""
        last, growing = self._samples[-1], host_memory.grew_most(self.samples)
        if growing is None or last.limit is None or self._questions >= _QUESTIONS:
            return
        pid, rise = growing
        asked, size = self._asked.get(pid, (now - _ASKING, last.private[pid] - rise))
        grown = last.private[pid] - size >= _GROWN * last.limit
        if grown and now - asked >= _ASKING and last.limit - (last.used or 0) > _ROOM:
            self._questions += questions.ask(self._run, pid, questions.HOLD)
            self._asked[pid] = (now, last.private[pid])

    def _is_answer_due(self) -> bool:
        """Whether the process that grows has been asked, may still answer, and there is time to wait for it."""
        alarm = self._raised
        if alarm is None or alarm.growing is None or (alarm.seconds_left or 0.0) < 2 * _PATIENCE:
            return False
        asked, since = alarm.growing[0] in self._asked, time.monotonic() - self._raised_at
        return asked and since < _PATIENCE and not questions.read_held(self._run, alarm.growing[0])

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
        own = files.folder_of(self._run, growing[0]) if growing is not None else None
        is_worker = growing is not None and own is None and self._is_worker(growing[0])
        worker = files.worker_folder_of(self._run, growing[0], is_worker=is_worker) if growing is not None else None
        rises = [each for each in host_memory.rises(self.samples).values() if each > 0]
        folder = own or next(iter(layout.process_folders(self._run)), None)
        known = own or worker or folder
        moment = None
        if folder is not None:
            with contextlib.suppress(UnreadableRun):
                moment = blackbox.read(folder / files.BLACK_BOX).last
        return HostAlarm(
            samples=self.samples,
            seconds_left=host_memory.seconds_left(self.samples),
            growing=growing,
            trains=own is not None,
            loads=is_worker or (own is None and worker is not None),
            together=sum(rises),
            alike=sum(each >= _ALIKE * max(rises) for each in rises),
            holders=self._holders(growing[0] if growing is not None else 0, known),
            pinned=pinned(folder) if folder is not None else 0,
            rank=layout.rank_of(folder) if folder is not None else 0,
            step=moment.step if moment is not None else None,
            file=moment.file if moment is not None else "",
            line=moment.line if moment is not None else 0,
        )

    def _holders(self, pid: int, folder: Path | None) -> tuple[HeldMemory, ...]:
        """By what the process has said when it was asked, or else of its own accord."""
        return questions.read_held(self._run, pid) or (holders(folder) if folder is not None else ())

    def _is_worker(self, pid: int) -> bool:
        return (cgroups.text(self._proc / str(pid) / "comm") or "").startswith(_WORKER)


class _Holders(msgspec.Struct, tag="holders", tag_field="kind"):
    holders: tuple[HeldMemory, ...]


def holders(folder: Path) -> tuple[HeldMemory, ...]:
    """What held most at the last look into a process, the biggest first."""
    with contextlib.suppress(OSError):
        for line in reversed((folder / files.EVENTS).read_bytes().splitlines()):
            if b'"holders"' in line:
                with contextlib.suppress(msgspec.DecodeError):
                    return msgspec.json.decode(line, type=_Holders).holders
    return ()


class _Series(msgspec.Struct, tag="memory", tag_field="kind"):
    pinned: int = 0


def pinned(folder: Path) -> int:
    """Host memory that a process had pinned for its GPU when it last said so."""
    with contextlib.suppress(OSError):
        for line in reversed((folder / files.EVENTS).read_bytes().splitlines()):
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(line, type=_Series).pinned
    return 0


def _shm() -> tuple[int | None, int | None]:
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        return (found.f_blocks - found.f_bavail) * found.f_frsize, found.f_blocks * found.f_frsize
    return None, None
