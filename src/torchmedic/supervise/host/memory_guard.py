"""Samples of the host's memory during the run, and an alarm before memory runs out.

A sample every two seconds while there is much more memory than the run needs (every second in a young run), one a
second while there is enough or the use of memory does not change, five a second when it gets tight. A sample takes some
hundred microseconds, most of it for files of the kernel.
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
from torchmedic.records.memory import HeldMemory, HostAlarm, MemorySample
from torchmedic.runfolder import events, layout, questions
from torchmedic.supervise.boxes import read_box
from torchmedic.supervise.host import cgroups
from torchmedic.supervise.host.host_pressure import psi, shared_memory

_AMPLE_INTERVAL_SECONDS = 2.0
_CALM_INTERVAL_SECONDS = 1.0
_TIGHT_INTERVAL_SECONDS = 0.2
_SLACK_SECONDS = 0.05  # a look may come a little early
_YOUNG_RUN_SECONDS = 20.0  # a young run needs more samples to show its growth, unless much memory is left
_YOUNG_INTERVAL_SECONDS = 0.4
_QUESTION_GROWTH_SHARE = 0.05  # of the limit: growth after which a process is asked what it holds, and asked again
_QUESTION_INTERVAL_SECONDS = 0.4
_MAX_QUESTIONS = 10  # per run
_MIN_FREE_BYTES = 128 << 20  # the process needs some memory to answer
_MAX_ANSWER_SECONDS = 0.6  # that an alarm may wait for the answer
_MAX_SAMPLES = 150
_LIMITS_INTERVAL_SECONDS = 30.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_PROCESSES = 64
_ALIKE_SHARE = 0.5  # share of the growth of the process that grew most
_WORKER = "pt_data_worker"  # torch's name for a DataLoader worker


class MemoryGuard:
    """Samples memory; `alarms` returns a new alarm once."""

    def __init__(self, run: Path, proc: Path = Path("/proc"), groups: Path | None = None) -> None:
        self._run = run
        self._proc = proc
        self._groups = groups or cgroups.default_root()
        self._samples: deque[MemorySample] = deque(maxlen=_MAX_SAMPLES)
        self._tight = False  # after the last sample
        self._swapped: tuple[float, int] | None = None
        self._raised: HostAlarm | None = None
        self._told = False
        self._broken = False
        self._began = time.monotonic()
        self._raised_at = 0.0
        self._asked: dict[int, tuple[float, int]] = {}  # by process: time of the last question, and its size then
        self._questions = 0
        self._limits: dict[str, int] = {}  # of the control groups that this process is in and that have one
        self._limits_due = 0.0

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        return tuple(self._samples)

    @property
    def pause(self) -> float:
        """Seconds between two samples."""
        if self._tight or (self._raised is not None and not self._told):
            return _TIGHT_INTERVAL_SECONDS
        is_ample = bool(self._samples) and host_memory.is_ample(self._samples[-1])
        if time.monotonic() - self._began <= _YOUNG_RUN_SECONDS:
            return _CALM_INTERVAL_SECONDS if is_ample else _YOUNG_INTERVAL_SECONDS
        return _AMPLE_INTERVAL_SECONDS if is_ample else _CALM_INTERVAL_SECONDS

    def look(self, pids: Iterable[int]) -> None:
        """Take a sample if one is due. Called a few times a second with the processes of the run."""
        now = time.monotonic()
        last = self._samples[-1] if self._samples else None
        tight = self._tight
        if self._broken or (last is not None and now - last.time < self.pause - _SLACK_SECONDS):
            return
        try:
            self._samples.append(self._sample(now, pids))
            self._tight = host_memory.is_tight(self.samples)
            if tight and not self._told:
                self._ask(now)
            if self._raised is None and host_memory.is_alarming(self.samples):
                self._raised, self._raised_at = self._alarm(), now
        except Exception as error:
            self._broken = True
            report_fault("supervise.memory", error)

    def alarms(self) -> list[HostAlarm]:
        """The alarm, if it was just raised."""
        if self._raised is None or self._told:
            return []
        if not self._raised.holders:
            if self._is_answer_due():
                return []
            late = self._alarm()
            self._raised = msgspec.structs.replace(
                self._raised, holders=late.holders, size_when_told=late.size_when_told
            )
        self._told = True
        return [self._raised]

    def _ask(self, now: float) -> None:
        """Ask the growing process what it holds, while there is still time for an answer."""
        last, growing = self._samples[-1], host_memory.grew_most(self.samples)
        if growing is None or last.limit is None or self._questions >= _MAX_QUESTIONS:
            return
        pid, rise = growing
        asked, size = self._asked.get(pid, (now - _QUESTION_INTERVAL_SECONDS, last.private[pid] - rise))
        grown = last.private[pid] - size >= _QUESTION_GROWTH_SHARE * last.limit
        if grown and now - asked >= _QUESTION_INTERVAL_SECONDS and last.limit - (last.used or 0) > _MIN_FREE_BYTES:
            self._questions += questions.ask(self._run, pid, questions.HOLD)
            self._asked[pid] = (now, last.private[pid])

    def _is_answer_due(self) -> bool:
        """Whether the growing process was asked, may still answer, and there is time to wait."""
        alarm = self._raised
        if alarm is None or alarm.growing is None or (alarm.seconds_left or 0.0) < 2 * _MAX_ANSWER_SECONDS:
            return False
        asked, since = alarm.growing[0] in self._asked, time.monotonic() - self._raised_at
        return asked and since < _MAX_ANSWER_SECONDS and not questions.read_held(self._run, alarm.growing[0])

    def _sample(self, now: float, pids: Iterable[int]) -> MemorySample:
        meminfo = cgroups.table(f"{self._proc}/meminfo", "MemTotal", "MemAvailable", "SwapTotal")
        total, free = meminfo.get("MemTotal", 0) << 10, meminfo.get("MemAvailable", 0) << 10
        host = (total - free, total) if total else None
        sizes = {pid: found for pid in list(pids)[:_MAX_PROCESSES] if (found := self._sizes(pid)) is not None}
        group = self._group(sum(resident for resident, _ in sizes.values()))
        tight = group if group is not None and (host is None or group[0] / group[1] > host[0] / host[1]) else host
        shared = shared_memory()
        pressure = psi(f"{self._proc}/pressure/memory")
        return MemorySample(
            time=now,
            used=tight[0] if tight is not None else None,
            limit=tight[1] if tight is not None else None,
            bound="cgroup" if tight is not None and tight is not host else "host",
            private={pid: resident - shared for pid, (resident, shared) in sizes.items()},
            waiting=pressure.full if pressure is not None else None,
            # The kernel adds up all counters of all processors for this file.
            swap_in=self._swap_in(now) if meminfo.get("SwapTotal", 1) else 0.0,
            shm_used=shared[0] - shared[1] if shared is not None else None,
            shm_size=shared[0] if shared is not None else None,
        )

    def _group(self, resident: int) -> tuple[int, int] | None:
        """Bytes that the tightest cgroup holds and cannot reclaim, and its limit."""
        found = []
        now = time.monotonic()
        if now >= self._limits_due:
            self._limits_due = now + _LIMITS_INTERVAL_SECONDS
            folders = cgroups.folders("memory", self._proc / "self" / "cgroup", self._groups)
            self._limits = {folder: limit for folder in folders if (limit := cgroups.memory_limit(folder))}
        for folder, limit in self._limits.items():
            # The cgroup's own counter includes the page cache, which is given back on demand.
            held = cgroups.table(f"{folder}/memory.stat", "anon", "shmem", "total_rss", "total_shmem")
            names = ("anon", "shmem") if "anon" in held else ("total_rss", "total_shmem")
            found.append((sum(held.get(name, 0) for name in names) or resident, limit))
        return max(found, key=lambda each: each[0] / each[1], default=None)

    def _sizes(self, pid: int) -> tuple[int, int] | None:
        """Resident bytes of a process, and how many of them are file pages or shared."""
        words = (cgroups.text(f"{self._proc}/{pid}/statm") or "").split()
        with contextlib.suppress(ValueError, IndexError):
            return int(words[1]) * _PAGE_BYTES, int(words[2]) * _PAGE_BYTES
        return None

    def _swap_in(self, now: float) -> float | None:
        pages = cgroups.table(f"{self._proc}/vmstat", "pswpin").get("pswpin")
        before, self._swapped = self._swapped, None if pages is None else (now, pages)
        if before is None or pages is None or now <= before[0]:
            return None
        return max(0, pages - before[1]) * _PAGE_BYTES / (now - before[0])

    def _alarm(self) -> HostAlarm:
        growing = host_memory.grew_most(self.samples)
        own = events.folder_of(self._run, growing[0]) if growing is not None else None
        is_worker = growing is not None and own is None and self._is_worker(growing[0])
        worker = events.worker_folder_of(self._run, growing[0], is_worker=is_worker) if growing is not None else None
        rises = [each for each in host_memory.rises(self.samples).values() if each > 0]
        folder = own or next(iter(layout.process_folders(self._run)), None)
        known = own or worker or folder
        box = read_box(folder) if folder is not None else None
        moment = box.last if box is not None else None
        held, age = self._holders(growing[0] if growing is not None else 0, known)
        return HostAlarm(
            samples=self.samples,
            seconds_left=host_memory.seconds_left(self.samples),
            growing=growing,
            trains=own is not None,
            loads=is_worker or (own is None and worker is not None),
            together=sum(rises),
            alike=sum(each >= _ALIKE_SHARE * max(rises) for each in rises),
            holders=held,
            size_when_told=self._size_before(growing[0], age) if growing is not None else None,
            pinned=pinned(folder) if folder is not None else 0,
            rank=layout.rank_of(folder) if folder is not None else 0,
            step=moment.step if moment is not None else None,
            file=moment.file if moment is not None else "",
            line=moment.line if moment is not None else 0,
        )

    def _holders(self, pid: int, folder: Path | None) -> tuple[tuple[HeldMemory, ...], float | None]:
        """The holders from the process's answer, or else from its last report, and their age in seconds."""
        held = questions.read_held(self._run, pid)
        if held:
            return held, questions.seconds_since_held(self._run, pid)
        report = _last_report(folder) if folder is not None else None
        return (
            (report.holders, time.time() - report.time if report.time else None) if report is not None else ((), None)
        )

    def _size_before(self, pid: int, age: float | None) -> int | None:
        """The memory of a process some seconds ago: a process that grows fast holds more now than it has told."""
        if age is None:
            return None
        before = [each for each in self._samples if pid in each.private and each.time <= time.monotonic() - age]
        return before[-1].private[pid] if before else None

    def _is_worker(self, pid: int) -> bool:
        return (cgroups.text(self._proc / str(pid) / "comm") or "").startswith(_WORKER)


class _Holders(msgspec.Struct, tag="holders", tag_field="kind"):
    holders: tuple[HeldMemory, ...]
    time: float = 0.0  # in seconds since the epoch


def _last_report(folder: Path) -> _Holders | None:
    return next(reversed(events.events_of(folder, "holders", _Holders)), None)


def holders(folder: Path) -> tuple[HeldMemory, ...]:
    """The largest holders of memory in the last report of a process, largest first."""
    report = _last_report(folder)
    return report.holders if report is not None else ()


class _Series(msgspec.Struct, tag="memory", tag_field="kind"):
    pinned: int = 0


def pinned(folder: Path) -> int:
    """Pinned host memory in the last report of a process, in bytes."""
    reports = events.events_of(folder, "memory", _Series)
    return reports[-1].pinned if reports else 0
