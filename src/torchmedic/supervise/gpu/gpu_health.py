"""The GPUs while the run goes on: errors that the driver reports, memory errors, throttling, heat.

From the moment on that a process of the run has a GPU open, and in a thread of its own: the driver of a GPU that has
fallen off the bus can take its time to answer. Four glances a second for events, everything else every ten seconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from torchmedic.contained import report_fault
from torchmedic.records.gpu import GpuHealth, GpuState
from torchmedic.runfolder import gpu as gpu_files
from torchmedic.supervise.gpu.nvml import REASONS, Gpus

_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_LOOK = 1.0
_GLANCE = 0.25
_READ = 10.0
_CLOSE = 2.5  # seconds of a close look
_LAST = 2.0  # seconds that the end of a run waits for a driver that does not answer
_SERIOUS = frozenset(REASONS[bit] for bit in (0x08, 0x20, 0x40, 0x80))


class GpuWatch:
    """Waits for a process of the run to use a GPU, and keeps an eye on all of them from then on."""

    def __init__(self, run: Path, rank: int | None = None) -> None:
        self._run = run
        self._rank = rank
        self._pids: frozenset[int] = frozenset()
        self._looked = -_LOOK
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._close_until = 0.0

    def look(self, pids: Iterable[int]) -> None:
        """Called a few times a second with the processes that have imported torch."""
        now = time.monotonic()
        if now - self._looked < _LOOK or self._stop.is_set():
            return
        self._looked = now
        self._pids = frozenset(pids)
        if self._thread is None and any(map(os.path.exists, _DEVICES)) and any(map(uses_gpu, self._pids)):
            self._thread = threading.Thread(target=self._run_contained, name="torchmedic-gpu", daemon=True)
            self._thread.start()

    def look_closely(self) -> None:
        """A process does not get on: put down how the GPUs are at every glance for a while."""
        self._close_until = time.monotonic() + _CLOSE

    def last_look(self) -> None:
        """The run is over: put down how the GPUs are now."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_LAST)

    def _run_contained(self) -> None:
        try:
            self._watch()
        except Exception as error:
            report_fault("supervise.gpu", error)

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:
            return  # no driver, or one that does not talk to us: the run is none the worse
        gpus = Gpus(pynvml)
        last = gpus.read(self._pids)
        self._write(last)
        read = time.monotonic()
        stopping = False
        while not stopping:
            stopping = self._stop.wait(_GLANCE)
            close = time.monotonic() < self._close_until
            if gpus.events() or stopping or close or time.monotonic() - read > _READ:
                now = gpus.read(self._pids)
                if stopping or close or _notable(now) != _notable(last):
                    self._write(now)
                    last = now
                read = time.monotonic()

    def _write(self, health: GpuHealth) -> None:
        with contextlib.suppress(OSError):  # a full disk is not our business here
            gpu_files.write_gpu_health(self._run, health, self._rank)


def uses_gpu(pid: int) -> bool:
    """Whether a process has a GPU open."""
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if target == "/dev/dxg" or (target.startswith("/dev/nvidia") and target[11:].isdecimal()):
                    return True
    return False


def _notable(health: GpuHealth) -> object:
    """What is worth a new record. Temperature and power always change."""
    return [
        (
            (gpu.lost, gpu.xids, gpu.ecc_uncorrected),
            (gpu.rows_remapped, gpu.remap_pending, gpu.pages_retired),
            (_SERIOUS.intersection(gpu.throttled), _is_hot(gpu)),
        )
        for gpu in health.gpus
    ]


def _is_hot(gpu: GpuState) -> bool:
    return (gpu.hottest or 0) >= (gpu.slowdown_temperature or 1000) - 3
