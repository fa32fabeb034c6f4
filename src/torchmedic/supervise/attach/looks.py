"""Several looks at a tree of processes from outside: /proc always, py-spy where it is installed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from torchmedic import rundir
from torchmedic.errors import UnreadableRun
from torchmedic.observe import blackbox
from torchmedic.records import BoxContents, GpuHealth
from torchmedic.settings import RUN_DIR_VARIABLE
from torchmedic.stall_records import InsideView, ProcessView, PyThread, Stall
from torchmedic.supervise import host_pressure
from torchmedic.supervise.attach import targets
from torchmedic.supervise.cgroups import text
from torchmedic.supervise.gpu_health import uses_gpu
from torchmedic.supervise.proc import pyspy, tree, waits
from torchmedic.supervise.proc.process import PROC

SECONDS = 2.0
_LOOKS = 4
_AT_ONCE = 4
_NVML = 1.5  # seconds that the driver of a GPU may take to answer


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen: a stall for each process that trains, and why there are no Python stacks, if so."""

    stalls: tuple[Stall, ...] = ()
    processes: tuple[ProcessView, ...] = ()
    no_stacks: str = ""
    run: Path | None = None


def look(pid: int, *, seconds: float = SECONDS, native: bool = False) -> Seen:
    """Look at a process and its descendants for some seconds.

    Args:
        pid: The process.
        seconds: For how long.
        native: Whether py-spy may stop each process for a moment, to see frames of C.
    """
    begun = time.monotonic()
    before = tree.tree(pid)
    python = {view.pid for view in before if targets.is_python(view)}
    numbers = [view.pid for view in before]
    pressure = host_pressure.read(pid, numbers)
    stacks = _Stacks(sorted(python))
    for number in range(_LOOKS):
        _sleep_until(begun + seconds * number / (_LOOKS - 1))
        stacks.take(native=native and number == _LOOKS - 1)
        if stacks.failure:
            _sleep_until(begun + seconds)
            break
    after = waits.with_waits(tree.compare_all(before, tree.tree(pid)))
    after = tuple(stacks.with_native(view) for view in after)
    later = host_pressure.read(pid, numbers)
    inside = stacks.inside()
    gpu = _gpus(frozenset(numbers)) if any(map(uses_gpu, numbers)) else None
    found = []
    run = None
    for view in targets.training(after, python):
        family = targets.below(view.pid, after)
        run = run or _run_of(view.pid)
        box = _box(run, view.pid)
        last = box.last if box is not None else None
        found.append(
            Stall(
                pid=view.pid,
                rank=targets.rank_of(view) or 0,
                phase=last.phase if last is not None else "other",
                step=last.step if last is not None else 0,
                still=max(0.0, time.time() - last.time) if last is not None else time.monotonic() - begun,
                limit=seconds,
                attached=True,
                box=box,
                processes=family,
                inside={each.pid: inside[each.pid] for each in family if each.pid in inside},
                host=later,
                pressure=host_pressure.difference(pressure, later),
                gpu=gpu,
                ended={each.pid: each.exit_status for each in family if each.exit_status is not None},
            )
        )
    return Seen(stalls=tuple(found), processes=after, no_stacks=stacks.failure, run=run)


class _Stacks:
    """The Python stacks of some processes, look by look."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._looks: dict[int, list[tuple[PyThread, ...]]] = defaultdict(list)
        self._native: dict[int, tuple[str, ...]] = {}
        self._time = 0.0
        self.failure = "" if pyspy.executable() is not None else "py-spy is not installed"

    def take(self, *, native: bool) -> None:
        if self.failure or not self._pids:
            return
        self._time = time.time()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            dumps = list(pool.map(lambda pid: pyspy.dump(pid, native=native), self._pids))
        failures = []
        for pid, dump in zip(self._pids, dumps, strict=True):
            if dump is None or not dump.threads:
                failures.append(dump.failure if dump is not None else "")
                continue
            self._looks[pid].append(dump.threads)
            self._native |= dump.native
        if not self._looks:
            self.failure = next(filter(None, failures), "")

    def inside(self) -> dict[int, InsideView]:
        return {pid: InsideView(pid=pid, time=self._time, threads=_merged(looks)) for pid, looks in self._looks.items()}

    def with_native(self, view: ProcessView) -> ProcessView:
        if not any(thread.tid in self._native for thread in view.threads):
            return view
        threads = (msgspec.structs.replace(thread, native=self._native.get(thread.tid, ())) for thread in view.threads)
        return msgspec.structs.replace(view, threads=tuple(threads))


def _merged(looks: list[tuple[PyThread, ...]]) -> tuple[PyThread, ...]:
    """The last look, and where each thread was in all of them."""
    samples: dict[int, list[str]] = defaultdict(list)
    lines: dict[int, list[int]] = defaultdict(list)
    for look_ in looks:
        for thread in look_:
            samples[thread.ident].append(" ".join(f"{frame.file}:{frame.line}" for frame in thread.frames))
            own = thread.user_frame
            lines[thread.ident].append(own.line if own is not None else 0)
    return tuple(
        msgspec.structs.replace(
            thread, samples=tuple(samples[thread.ident]), lines=tuple(lines[thread.ident]), holds_gil=thread.holds_gil
        )
        for thread in looks[-1]
    )


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _run_of(pid: int) -> Path | None:
    """The folder of the torchmedic run that a process belongs to."""
    for entry in (text(f"{PROC}/{pid}/environ") or "").split("\0"):
        if entry.startswith(f"{RUN_DIR_VARIABLE}="):
            return Path(entry.partition("=")[2])
    return None


def _box(run: Path | None, pid: int) -> BoxContents | None:
    if run is None:
        return None
    folder = rundir.folder_of(run, pid)
    for each in [folder] if folder is not None else rundir.process_folders(run):
        with contextlib.suppress(UnreadableRun):
            box = blackbox.read(each / rundir.BLACK_BOX)
            if box.pid == pid:
                return msgspec.structs.replace(box, moments=box.moments[-64:])
    return None


def _gpus(pids: frozenset[int]) -> GpuHealth | None:
    """What NVML says, asked in a thread: the driver of a GPU that is gone can take its time."""
    answers: list[GpuHealth] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            import pynvml

            from torchmedic.supervise.nvml import Gpus

            pynvml.nvmlInit()
            answers.append(Gpus(pynvml).read(pids))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_NVML)
    if not answers:
        return None
    # By which number the processes know a GPU is a matter of their environment, not of ours.
    gpus = tuple(msgspec.structs.replace(gpu, ordinal=None) for gpu in answers[0].gpus)
    return msgspec.structs.replace(answers[0], gpus=gpus)
