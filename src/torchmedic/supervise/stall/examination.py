"""The examination of a process that does not get on: two looks from outside, several from inside, in two seconds.

It is a generator, taken a step further at every tick of the parent, which must not wait: signals have to be passed on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmedic import gpu_files, inside_files, rundir
from torchmedic.errors import UnreadableRun
from torchmedic.observe import blackbox
from torchmedic.records import BoxContents
from torchmedic.stall_records import InsideView, ProcessView, Stall
from torchmedic.supervise import host_pressure
from torchmedic.supervise.proc import pyspy, tree, waits
from torchmedic.supervise.stall.dumps import read_dump
from torchmedic.supervise.stall.progress import Progress

_LOOK = 1.3  # seconds between the two looks from outside; those from inside fall in between
_ANSWER = 2.2  # seconds until a process that does not answer is taken to be unable to
_DUMP = 0.6  # seconds that faulthandler is given after that


def examine(run: Path, progress: Progress, limit: float, rank: int, ended: dict[int, int]) -> Iterator[Stall | None]:
    """Look; the last thing that it yields is what was seen."""
    begun = time.monotonic()
    pids = tree.pids(progress.pid)
    asked = [pid for pid in pids if inside_files.ask(run, pid)]
    pressure = host_pressure.read(progress.pid, pids)
    before = tree.tree(progress.pid)
    yield from _until(begun + _LOOK)
    after = waits.with_waits(tree.compare_all(before, tree.tree(progress.pid)))
    rates = host_pressure.difference(pressure, later := host_pressure.read(progress.pid, pids))
    while time.monotonic() < begun + _ANSWER and any(inside_files.read_answer(run, pid) is None for pid in asked):
        yield None
    inside = {pid: answer for pid in asked if (answer := inside_files.read_answer(run, pid)) is not None}
    mute = [view for view in after if view.pid in asked and view.pid not in inside]
    dumped = {view.pid: _size(run, view.pid) for view in mute if _make_dump(view)}
    if dumped:
        yield from _until(time.monotonic() + _DUMP)
    for view in mute:
        seen = _from_dump(run, view, dumped.get(view.pid)) or _from_outside(view.pid)
        if seen is not None:
            inside[view.pid] = seen
    yield Stall(
        pid=progress.pid,
        rank=rank,
        phase=progress.phase,
        step=progress.last.step if progress.last is not None else 0,
        still=progress.still(time.time()),
        limit=limit,
        usual=progress.usual,
        box=_box(run, progress.pid),
        processes=after,
        inside=inside,
        host=later,
        pressure=rates,
        gpu=gpu_files.read_gpu_health(run),
        ended=ended,
        mute=tuple(view.pid for view in mute),
    )


def _until(moment: float) -> Iterator[None]:
    while time.monotonic() < moment:
        yield None


def _make_dump(view: ProcessView) -> bool:
    """Have faulthandler write the stacks: only where the signal is caught, as it would end the process elsewhere."""
    number = inside_files.signal_number()
    if number is None or view.state in "TtZX" or not view.caught_signals >> (number - 1) & 1:
        return False
    with contextlib.suppress(OSError):
        os.kill(view.pid, number)
        return True
    return False


def _size(run: Path, pid: int) -> int:
    with contextlib.suppress(OSError):
        return inside_files.dump(run, pid).stat().st_size
    return 0


def _from_dump(run: Path, view: ProcessView, start: int | None) -> InsideView | None:
    if start is None:
        return None
    with contextlib.suppress(OSError):
        text = inside_files.dump(run, view.pid).read_bytes()[start:].decode(errors="replace")
        return read_dump(text, view)
    return None


def _from_outside(pid: int) -> InsideView | None:
    seen = pyspy.dump(pid)
    if seen is None or not seen.threads:
        return None
    return InsideView(pid=pid, time=time.time(), threads=seen.threads, by_signal=True)


def _box(run: Path, pid: int) -> BoxContents | None:
    for folder in rundir.process_folders(run):
        with contextlib.suppress(UnreadableRun):
            box = blackbox.read(folder / rundir.BLACK_BOX)
            if box.pid == pid:
                return msgspec.structs.replace(box, moments=box.moments[-64:])
    return None
