"""The examination of a process that does not get on: two looks from outside, several from inside, in two seconds.

It is a generator, taken a step further at every tick of the parent, which must not wait: signals have to be passed on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.observe.step import blackbox
from torchmedic.records import BoxContents
from torchmedic.records.inside import InsideView
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall
from torchmedic.runfolder import files as run_files
from torchmedic.runfolder import gpu, layout, questions
from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.proc import growing_files, libraries, lock_holders, outsiders, pyspy, tree, waits
from torchmedic.supervise.stall.answers import Answers
from torchmedic.supervise.stall.dumps import read_dump
from torchmedic.supervise.stall.peers import Peers
from torchmedic.supervise.stall.progress import Progress

_LOOK = 1.3  # seconds between the two looks from outside; those from inside fall in between
_PEERS = 3.5  # seconds that other ranks are given to answer
_DUMP = 0.6  # seconds that faulthandler is given after that


def examine(run: Path, progress: Progress, limit: float, rank: int, ended: dict[int, int]) -> Iterator[Stall | None]:
    """Look; the last thing that it yields is what was seen."""
    begun = time.monotonic()
    pids = tree.pids(progress.pid)
    asked = [pid for pid in pids if questions.ask(run, pid)]
    pressure = host_pressure.read(progress.pid, pids)
    peers = Peers(run, pids)
    files = growing_files.sizes(pids, run)
    before = tree.tree(progress.pid)
    yield from _until(begun + _LOOK)
    after = waits.with_waits(tree.compare_all(before, tree.tree(progress.pid)))
    after = growing_files.with_growth(after, files, growing_files.sizes(pids, run))
    after = tuple(_with_libraries(view) if view.pid == progress.pid else view for view in after)
    rates = host_pressure.difference(pressure, later := host_pressure.read(progress.pid, pids))
    answers = Answers(run, asked)
    while answers.pending(after, time.monotonic() - begun):
        yield None
    while peers.pending and time.monotonic() < begun + _PEERS:
        yield None
    inside = {pid: answer for pid in asked if (answer := questions.read_answer(run, pid)) is not None}
    mute = [view for view in after if view.pid in asked and view.pid not in inside and not answers.heard(view.pid)]
    dumped = {view.pid: _size(run, view.pid) for view in mute}
    for view in mute:
        _make_dump(view)
    if dumped:
        yield from _until(time.monotonic() + _DUMP)
    for view in mute:
        seen = _from_dump(run, view, dumped.get(view.pid)) or _from_outside(view.pid)
        if seen is not None:
            inside[view.pid] = seen
    inside = {pid: lock_holders.with_holders(view) for pid, view in inside.items()}
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
        gpu=gpu.read_gpu_health(run),
        ended=ended,
        mute=tuple(view.pid for view in mute),
        peers=peers.seen(),
        outsiders=outsiders.at_other_ends(after),
        above=outsiders.above(progress.pid),
    )


def _with_libraries(view: ProcessView) -> ProcessView:
    return msgspec.structs.replace(view, libraries=libraries.compilers(view.pid))


def _until(moment: float) -> Iterator[None]:
    while time.monotonic() < moment:
        yield None


def _make_dump(view: ProcessView) -> None:
    """Only where the signal is caught: it would end the process elsewhere."""
    number = questions.signal_number()
    if number is not None and view.listener is not None and view.caught_signals >> (number - 1) & 1:
        questions.ask_for_dump(view.pid, view.listener.tid)


def _size(run: Path, pid: int) -> int:
    with contextlib.suppress(OSError):
        return questions.dump(run, pid).stat().st_size
    return 0


def _from_dump(run: Path, view: ProcessView, start: int | None) -> InsideView | None:
    if start is None:
        return None
    with contextlib.suppress(OSError):
        text = questions.dump(run, view.pid).read_bytes()[start:].decode(errors="replace")
        return read_dump(text, view)
    return None


def _from_outside(pid: int) -> InsideView | None:
    seen = pyspy.dump(pid)
    if seen is None or not seen.threads:
        return None
    return InsideView(pid=pid, time=time.time(), threads=seen.threads, by_signal=True)


def _box(run: Path, pid: int) -> BoxContents | None:
    for folder in layout.process_folders(run):
        with contextlib.suppress(UnreadableRun):
            box = blackbox.read(folder / run_files.BLACK_BOX)
            if box.pid == pid:
                return msgspec.structs.replace(box, moments=box.moments[-64:])
    return None
