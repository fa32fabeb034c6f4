"""When a thread last ran, from the scheduler's statistics (`/proc/PID/task/TID/sched`, if the kernel has them).

So even the first look at a process shows for how long it has been asleep. The times are from a clock of each CPU, which
leaves out the time taken by a hypervisor or by interrupts; on a virtual machine these clocks differ by many seconds. To
read the clock of a CPU, a thread of torchmedic runs on that CPU and reads its own time.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc.process import PROC, Stat

_EXEC_START = re.compile(r"^se\.exec_start\s*:\s*(\d+\.\d+)", re.MULTILINE)
_MAX_CPUS = 32
_READINGS_PER_CLOCK = 3
_MAX_CLOCK_SECONDS = 1.0  # for all clocks: a CPU may be busy

Clocks = dict[int, float]


def with_sleep(views: Iterable[ProcessView], *, proc: Path = PROC) -> list[ProcessView]:
    """Add the seconds for which each sleeping thread has not run."""
    views = list(views)
    notes = {
        (view.pid, thread.tid): note
        for view in views
        for thread in view.threads
        if thread.state in "SDIT" and (note := _note(f"{proc}/{view.pid}/task/{thread.tid}")) is not None
    }
    clocks = _clocks({cpu for cpu, _ in notes.values()})
    now = time.monotonic()
    filled = []
    for view in views:
        threads = []
        for thread in view.threads:
            cpu, last = notes.get((view.pid, thread.tid), (-1, 0.0))
            slept = now + clocks[cpu] - last if cpu in clocks and last else None
            threads.append(msgspec.structs.replace(thread, asleep=_checked(slept, thread, view.elapsed)))
        filled.append(msgspec.structs.replace(view, threads=tuple(threads)))
    return filled


def _checked(slept: float | None, thread: ThreadView, elapsed: float) -> float | None:
    """Correct a sleep by two looks: a thread that woke in between slept for less, any other for at least as long."""
    if thread.state not in "SDIT":
        return None
    if thread.wakes is None or not elapsed:
        return None if slept is None else max(0.0, slept)
    if thread.wakes > 0:
        return None if slept is None else min(max(0.0, slept), elapsed)
    return elapsed if slept is None else max(slept, elapsed)


def _note(base: str) -> tuple[int, float] | None:
    """The CPU that a thread last ran on, and the time on that CPU's clock."""
    last = _last(base)
    stat = Stat(text(f"{base}/stat") or "") if last is not None else None
    return (stat.number(39), last) if stat and last is not None else None


def _last(base: str) -> float | None:
    match = _EXEC_START.search(text(f"{base}/sched") or "")
    return float(match[1]) / 1000 if match is not None else None


def _clocks(cpus: set[int]) -> Clocks:
    """How far the clock of each CPU is ahead of ours, without CPUs that we may not run on."""
    found: Clocks = {}
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return found

    def visit() -> None:
        for cpu in sorted(cpus)[:_MAX_CPUS]:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {cpu})  # of this thread only
                ahead = [
                    last - time.monotonic()
                    for _ in range(_READINGS_PER_CLOCK)
                    if (last := _last(f"{PROC}/thread-self"))
                ]
                if ahead:
                    found[cpu] = max(ahead)  # the thread may have been preempted between the two clocks

    visitor = threading.Thread(target=visit, name="torchmedic-clocks", daemon=True)
    visitor.start()
    visitor.join(_MAX_CLOCK_SECONDS)
    return dict(found)
