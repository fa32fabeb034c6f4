"""Whether whoever reads the data is at work on it."""

from __future__ import annotations

from torchmedic.diagnose.rules.hangs._at_work import (
    MOVING,
    demand,
    ends_soon,
    frames_in,
    native,
    receives,
    share,
    sleep_left,
    sleeps,
)
from torchmedic.diagnose.words.format import duration, size
from torchmedic.diagnose.words.stall import BUSY
from torchmedic.records.inside import InsideView, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall

FETCHING = "torch/utils/data/_utils/fetch.py"


def waits_for_workers(thread: PyThread | None) -> bool:
    """Whether a thread waits for what a DataLoader's workers send. Without workers it reads for itself."""
    frames = thread.frames if thread is not None else ()
    return any(frame.function in ("_try_get_data", "_get_data") and "dataloader.py" in frame.file for frame in frames)


def sleeps_for_long(stall: Stall, process: ProcessView) -> bool:
    """Whether a process sleeps for so long that it may as well be called stuck."""
    return not ends_soon(stall, sleep_left(process.main))


def works(stall: Stall, process: ProcessView, view: InsideView) -> str:
    """The sign that a process works on the data that it reads; empty if there is none."""
    thread, loop = view.main, view.loop
    if thread is None or view.by_signal:
        return "is at work" if demand(process.main) > BUSY else ""  # it could not answer
    if frames_in(thread, FETCHING) is None:
        return ""
    if loop is not None and loop.kind == "while" and (loop.endless or loop.unchanged):
        return ""  # it may never end: that is for others to say
    row = native(process, thread)
    left = sleep_left(row)
    if sleeps(row) and not sleeps_for_long(stall, process):
        return f"sleeps, for {duration(left)} more" if left is not None else "sleeps"
    if demand(row) > BUSY:
        return f"is at work ({share(row)})" if share(row) else "is at work"
    if (process.bytes_read or 0.0) > MOVING:
        return f"reads {size(int(process.bytes_read or 0))} a second"
    if receives(row):
        return "reads, and receives data from time to time"
    return "moves" if thread.moved else ""
