"""When a thread last ran, by the scheduler's own notes (`/proc/PID/task/TID/sched`, where the kernel has them).

So even the first look at a process can tell for how long it has been asleep. The scheduler has a clock of its own, which
we read off ourselves: whoever asks is running.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from torchmedic.stall_records import ProcessView, ThreadView
from torchmedic.supervise.cgroups import text
from torchmedic.supervise.proc.process import PROC

_EXEC_START = re.compile(r"^se\.exec_start\s*:\s*(\d+\.\d+)", re.MULTILINE)


def now(*, proc: Path = PROC) -> float | None:
    """The scheduler's time in seconds."""
    return _last(f"{proc}/thread-self/sched")


def with_sleep(view: ProcessView, moment: float | None, *, proc: Path = PROC) -> ProcessView:
    """The same process, with how long each of its sleeping threads has not run."""
    if moment is None:
        return view
    threads = tuple(_with_sleep(view.pid, thread, moment, proc) for thread in view.threads)
    return msgspec.structs.replace(view, threads=threads)


def _with_sleep(pid: int, thread: ThreadView, moment: float, proc: Path) -> ThreadView:
    if thread.state not in "SDIT":
        return thread
    last = _last(f"{proc}/{pid}/task/{thread.tid}/sched")
    return thread if not last else msgspec.structs.replace(thread, asleep=max(0.0, moment - last))


def _last(path: str) -> float | None:
    match = _EXEC_START.search(text(path) or "")
    return float(match[1]) / 1000 if match is not None else None
