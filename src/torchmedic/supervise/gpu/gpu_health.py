"""The health of the GPUs during the run: errors reported by the driver, memory errors, throttling, temperature.

A thread watches the GPUs as soon as a process of the run has one open; the driver of a GPU that has fallen off the bus
may answer late. It asks for events four times a second, and for everything else every ten seconds.
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
from torchmedic.supervise.gpu.nvml import SERIOUS_REASONS, connect
from torchmedic.supervise.proc import open_files

_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_LOOK_SECONDS = 1.0
_EVENT_SECONDS = 0.25
_READ_SECONDS = 10.0
_CLOSE_LOOK_SECONDS = 2.5
_MAX_LAST_SECONDS = 2.0  # that the end of a run waits for the driver


class GpuWatch:
    """Waits until a process of the run uses a GPU, and watches all GPUs from then on."""

    def __init__(self, run: Path, rank: int | None = None) -> None:
        self._run = run
        self._rank = rank
        self._looked = -_LOOK_SECONDS
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._close_until = 0.0

    def look(self, pids: Iterable[int]) -> None:
        """Start the thread if a process uses a GPU. Called a few times a second, with all processes that use torch."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or self._stop.is_set():
            return
        self._looked = now
        if self._thread is None and any(map(os.path.exists, _DEVICES)) and any(map(uses_gpu, pids)):
            self._thread = threading.Thread(target=self._run_contained, name="torchmedic-gpu", daemon=True)
            self._thread.start()

    def look_closely(self) -> None:
        """Record the state of the GPUs several times a second for a while, because a process makes no progress."""
        self._close_until = time.monotonic() + _CLOSE_LOOK_SECONDS

    def last_look(self) -> None:
        """Record the state of the GPUs at the end of the run."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_MAX_LAST_SECONDS)

    def _run_contained(self) -> None:
        try:
            self._watch()
        except Exception as error:
            report_fault("supervise.gpu", error)

    def _watch(self) -> None:
        gpus = connect()
        if gpus is None:
            return
        last = gpus.read()
        self._write(last)
        read = time.monotonic()
        stopping = False
        while not stopping:
            stopping = self._stop.wait(_EVENT_SECONDS)
            close = time.monotonic() < self._close_until
            if gpus.events() or stopping or close or time.monotonic() - read > _READ_SECONDS:
                now = gpus.read()
                if stopping or close or _notable(now) != _notable(last):
                    self._write(now)
                    last = now
                read = time.monotonic()

    def _write(self, health: GpuHealth) -> None:
        with contextlib.suppress(OSError):  # a full disk is reported elsewhere
            gpu_files.write_gpu_health(self._run, health, self._rank)


def uses_gpu(pid: int) -> bool:
    """Whether a process has a GPU open."""
    targets = (target for _, target in open_files.descriptors(pid))
    return any(
        target == "/dev/dxg" or (target.startswith("/dev/nvidia") and target[11:].isdecimal()) for target in targets
    )


def _notable(health: GpuHealth) -> object:
    """The values whose change is worth a new record. Temperature and power change all the time."""
    return [
        (
            (gpu.lost, gpu.xids, gpu.ecc_uncorrected),
            (gpu.rows_remapped, gpu.remap_pending, gpu.pages_retired),
            (SERIOUS_REASONS.intersection(gpu.throttled), _is_hot(gpu)),
        )
        for gpu in health.gpus
    ]


def _is_hot(gpu: GpuState) -> bool:
    return (gpu.hottest or 0) >= (gpu.slowdown_temperature or 1000) - 3
