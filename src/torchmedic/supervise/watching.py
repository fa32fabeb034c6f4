"""Reads a run folder from another terminal, during the run or after it. Nothing in the folder is changed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from torchmedic.errors import UnreadableRun
from torchmedic.records import BoxContents, Moment, Report
from torchmedic.records.gpu import GpuHealth, GpuState
from torchmedic.records.ranks import Collective
from torchmedic.report.live import State, View, Watched
from torchmedic.runfolder import files, layout, ring
from torchmedic.runfolder import gpu as gpu_files
from torchmedic.runfolder.confidential import work_of
from torchmedic.source.user_code import relative
from torchmedic.supervise.boxes import read_box
from torchmedic.supervise.gpu.nvml import connect

_HOME = ".torchmedic"
_MARKS = (files.REPORT, files.STACKS, ".confidential", ".no-checkup", ".job", ".parts", "rank*", "gpu*.json")
_RATE_SECONDS = 30.0  # the window in which steps are counted
_FRESH_SECONDS = 10.0  # a black box written within this time is alive even if its process cannot be seen
_GPU_INTERVAL_SECONDS = 3.0
_MAX_PROCESSES = 256  # that are shown


def find_run(requested: Path | None, cwd: Path) -> Path:
    """The folder to watch: the requested one, or the newest in the working folder.

    Raises:
        UnreadableRun: There is no such folder, or it is not a run folder.
    """
    if requested is None:
        with contextlib.suppress(OSError):
            runs = [path for path in (cwd / _HOME).iterdir() if path.is_dir() and path.name[0] != "."]
            if runs:
                return max(runs, key=lambda path: path.name)  # names begin with the time
        raise UnreadableRun(f"there is no run in {_HOME} (torchmedic watch RUN, or start one with torchmedic run)")
    folder = requested.parent if requested.name == files.REPORT and requested.is_file() else requested
    try:
        is_run = folder.is_dir() and (not any(folder.iterdir()) or any(any(folder.glob(mark)) for mark in _MARKS))
    except OSError as error:
        raise UnreadableRun(f"cannot read {folder}: {error.strerror}") from None
    if not is_run:
        raise UnreadableRun(f"{requested} is not a run folder")
    return folder


class Watch:
    """Reads one run folder repeatedly."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._gpus = _GpuReader()
        self._damage = ""  # why the report cannot be read

    def look(self) -> View:
        now = time.time()
        report = self._report()
        places = dict.fromkeys((self._run, work_of(self._run)))  # a confidential run works in another folder
        listed = [folder for place in places for folder in layout.process_folders(place)]
        folders = sorted(listed, key=lambda folder: (layout.rank_of(folder), folder.name))[:_MAX_PROCESSES]
        boxes = {folder: read_box(folder) for folder in folders}
        outcome = report.outcome if report is not None else None
        closed = outcome is not None and outcome.exit_status is not None
        processes = tuple(_watched(folder, box, now, closed=closed) for folder, box in boxes.items())
        state = _state(processes, closed=closed)
        began = min((box.started for box in boxes.values() if box is not None), default=None)
        last = max((box.last.time for box in boxes.values() if box is not None and box.last is not None), default=began)
        until = now if state in ("waiting", "running") else last
        diagnoses = [found for found in (report.diagnoses if report is not None else ()) if found.severity != "note"]
        return View(
            run=relative(str(self._run)),
            state=state,
            seconds=until - began if began is not None and until is not None else None,
            outcome=outcome,
            processes=processes,
            gpus=self._cards(live=state == "running"),
            found=len(diagnoses),
            last=diagnoses[-1] if diagnoses else None,
            damage=self._damage,
        )

    def _report(self) -> Report | None:
        self._damage = ""
        if not os.path.lexists(self._run / files.REPORT):
            return None
        try:
            return files.read_report(self._run)
        except UnreadableRun as error:
            self._damage = str(error)
        return None

    def _cards(self, *, live: bool) -> tuple[GpuState, ...]:
        """The GPUs of the run as its parent last wrote them, updated with NVML's current values."""
        written = [_health(path) for path in sorted(work_of(self._run).glob("gpu*.json"))[:_MAX_PROCESSES]]
        known = {gpu.uuid: gpu for health in written if health is not None for gpu in health.gpus}
        if not known:
            return ()
        shown = [gpu for gpu in known.values() if gpu.ordinal is not None] or list(known.values())
        now = self._gpus.last() if live else None
        return tuple(_newer(gpu, now) for gpu in shown)


class _GpuReader:
    """Asks NVML in a thread, because the driver may answer late or never."""

    def __init__(self) -> None:
        self._health: GpuHealth | None = None
        self._thread: threading.Thread | None = None

    def last(self) -> GpuHealth | None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="torchmedic-gpu", daemon=True)
            self._thread.start()
        return self._health

    def _read(self) -> None:
        with contextlib.suppress(Exception):
            gpus = connect()
            while gpus is not None:
                self._health = gpus.read()
                time.sleep(_GPU_INTERVAL_SECONDS)


def _newer(gpu: GpuState, now: GpuHealth | None) -> GpuState:
    """The recorded state, with the values that change all the time replaced by current ones."""
    import msgspec

    fresh = now.of(gpu.uuid) if now is not None else None
    if fresh is None:
        return gpu
    return msgspec.structs.replace(
        gpu,
        lost=gpu.lost or fresh.lost,
        throttle=fresh.throttle,
        temperature=fresh.temperature,
        power=fresh.power,
        memory_used=fresh.memory_used,
    )


def _health(path: Path) -> GpuHealth | None:
    rank = path.stem.partition(".")[2]
    return gpu_files.read_gpu_health(path.parent, int(rank) if rank.isdecimal() else None)


def _watched(folder: Path, box: BoxContents | None, now: float, *, closed: bool) -> Watched:
    if box is None:
        return Watched(name=folder.name, state="unreadable")
    last = box.last
    quiet = now - (last.time if last is not None else box.started)
    # On another host or in another container the pid means nothing, but a fresh entry does.
    calls, call = _last_call(folder)
    frame = call.frames[0] if call is not None and call.frames else None
    alive = lives(box.pid, box.started) or (quiet < _FRESH_SECONDS and not box.clean_exit and not closed)
    return Watched(
        name=folder.name,
        state="running" if alive else "ended" if box.clean_exit else "gone",
        pid=box.pid,
        phase=last.phase if last is not None else "",
        step=last.step if last is not None else None,
        rate=_rate(box.moments),
        quiet=quiet,
        rss=last.rss if last is not None else None,
        device_memory=last.device_memory if last is not None else None,
        calls=calls,
        last_call=call.op if call is not None else "",
        place=f"{relative(frame.file)}:{frame.line}" if frame is not None else "",
    )


def _last_call(folder: Path) -> tuple[int, Collective | None]:
    """How many collectives a process has called, and the last one; nothing for one that is no rank of a job."""
    with contextlib.suppress(UnreadableRun):
        return ring.read_last(folder / ring.FILE)
    return 0, None


def lives(pid: int, started: float) -> bool:
    """Whether a process lives and existed at the time `started`, so that it is no later process with the same pid."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError, ValueError):
        process = psutil.Process(pid)
        return bool(process.create_time() <= started + 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _rate(moments: tuple[Moment, ...]) -> float | None:
    """Steps per second in the last seconds before the last entry."""
    if len(moments) < 2:
        return None
    last = moments[-1]
    # The moment at which each step was first seen; the current step does not count yet.
    seen: dict[int, float] = {}
    for moment in moments:
        if moment.time >= last.time - _RATE_SECONDS:
            seen.setdefault(moment.step, moment.time)
    if len(seen) < 2:
        return None
    first, final = min(seen), max(seen)
    return (final - first) / (seen[final] - seen[first]) if seen[final] > seen[first] else None


def _state(processes: tuple[Watched, ...], *, closed: bool) -> State:
    if any(process.state == "running" for process in processes):
        return "running"
    if closed:
        return "ended"
    # A run may have no process for a moment between two of them. Only a process that died shows the end.
    if any(process.state == "gone" for process in processes):
        return "gone"
    return "waiting"
