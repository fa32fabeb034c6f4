"""The examination of a process that makes no progress: two looks from outside, several from inside, in two seconds.

The examination is a generator that the parent advances at every tick. The parent must not wait, because it has to
forward signals.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmedic.records.inside import InsideView, PyFrame, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall
from torchmedic.runfolder import gpu, questions
from torchmedic.source.user_code import is_user_file
from torchmedic.supervise.boxes import recent_box_of
from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.proc import file_locks, growing_files, outsiders, process, pyspy, tree, waits
from torchmedic.supervise.proc.thread_numbers import numbers_of
from torchmedic.supervise.stall.answers import Answers
from torchmedic.supervise.stall.peers import Peers
from torchmedic.supervise.stall.progress import Progress

_LOOK_SECONDS = 1.3  # between the two looks from outside; the looks from inside fall in between
_PEER_SECONDS = 3.5  # for the answers of other ranks
_DUMP_SECONDS = 0.6  # for faulthandler, after that

_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\)")
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_OWN_FILES = "torchmedic/observe/inside/"


def examine(run: Path, progress: Progress, limit: float, rank: int, ended: dict[int, int]) -> Iterator[Stall | None]:
    """Examine a process. Yields None until it is done, then the `Stall`."""
    begun = time.monotonic()
    pids = tree.pids(progress.pid)
    asked = [pid for pid in pids if questions.ask(run, pid)]
    pressure = host_pressure.read(progress.pid, pids)
    peers = Peers(run, pids)
    files = growing_files.sizes(pids, run)
    before = tree.tree(progress.pid)
    yield from _until(begun + _LOOK_SECONDS)
    after = waits.with_waits(tree.compare_all(before, tree.tree(progress.pid)))
    after = growing_files.with_growth(after, files, growing_files.sizes(pids, run))
    after = tuple(_with_libraries(view) if view.pid == progress.pid else view for view in after)
    rates = host_pressure.difference(pressure, later := host_pressure.read(progress.pid, pids))
    answers = Answers(run, asked)
    while answers.pending(after, time.monotonic() - begun):
        yield None
    while peers.pending and time.monotonic() < begun + _PEER_SECONDS:
        yield None
    inside = {pid: answer for pid in asked if (answer := questions.read_answer(run, pid)) is not None}
    mute = [view for view in after if view.pid in asked and view.pid not in inside and not answers.heard(view.pid)]
    dumped = {view.pid: _size(run, view.pid) for view in mute}
    for view in mute:
        _make_dump(view)
    if dumped:
        yield from _until(time.monotonic() + _DUMP_SECONDS)
    for view in mute:
        seen = _from_dump(run, view, dumped.get(view.pid)) or _from_outside(view.pid)
        if seen is not None:
            inside[view.pid] = seen
    inside = {pid: file_locks.with_holders(view) for pid, view in inside.items()}
    yield Stall(
        pid=progress.pid,
        rank=rank,
        phase=progress.phase,
        step=progress.last.step if progress.last is not None else 0,
        still=progress.still(time.time()),
        limit=limit,
        usual=progress.usual,
        box=recent_box_of(run, progress.pid),
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
    return msgspec.structs.replace(view, libraries=process.compilers(view.pid))


def _until(moment: float) -> Iterator[None]:
    while time.monotonic() < moment:
        yield None


def _make_dump(view: ProcessView) -> None:
    """Ask faulthandler for the stacks of a process, if it catches the signal; otherwise the signal would kill it."""
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
        return _read_dump(text, view)
    return None


def _read_dump(text: str, view: ProcessView) -> InsideView | None:
    """The stacks that faulthandler wrote for a process that holds the GIL."""
    found: list[tuple[int, list[PyFrame]]] = []
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            found.append((int(head[1], 16), []))
        elif found and (match := _FRAME.match(line)) is not None:
            file, function = match["file"], match["function"]
            found[-1][1].append(PyFrame(file=file, line=int(match["line"]), function=function, user=is_user_file(file)))
    found = [(ident, frames) for ident, frames in found if not any(_OWN_FILES in frame.file for frame in frames)]
    if not found:
        return None
    numbers = numbers_of(view.pid, [ident for ident, _ in found])
    threads = tuple(
        PyThread(ident=ident, tid=numbers.get(ident, 0), main=numbers.get(ident) == view.pid, frames=tuple(frames))
        for ident, frames in found
    )
    return InsideView(pid=view.pid, time=time.time(), by_signal=True, threads=threads)


def _from_outside(pid: int) -> InsideView | None:
    seen = pyspy.dump(pid)
    if seen is None or not seen.threads:
        return None
    return InsideView(pid=pid, time=time.time(), threads=seen.threads, by_signal=True)
