"""The examination of a process that makes no progress: two looks from outside, several from inside, in two seconds.

The examination is a generator that the parent advances at every tick. The parent must not wait, because it has to
forward signals.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from torchmedic.records.inside import InsideView, PyFrame, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.report import Location
from torchmedic.records.stall import Peer, Stall
from torchmedic.runfolder import gpu, layout, questions
from torchmedic.runfolder.files import read_diagnoses
from torchmedic.source.user_code import is_user_file
from torchmedic.supervise.boxes import read_box, recent_box_of
from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.proc import file_locks, open_files, process, pyspy, sleeps, tree, waits
from torchmedic.supervise.proc.futexes import numbers_of
from torchmedic.supervise.stall.progress import Progress

EXAMINATION_SECONDS = 2.0  # that an examination takes as a rule
_LOOK_SECONDS = 1.3  # between the two looks from outside; the looks from inside fall in between
_PEER_SECONDS = 3.5  # for the answers of other ranks
_DUMP_SECONDS = 0.6  # for faulthandler, after that

_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\)")
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_OWN_FILES = "torchmedic/observe/inside/"
_MAX_UNHEARD_SECONDS = 2.2  # after this, a process that has not heard the question cannot hear it
_MAX_ANSWER_SECONDS = 8.0  # for an answer, or for a question to a thread that gets no core
_MAX_WORKING_SECONDS = 60.0  # for an answer on a busy machine, while the thread works on it
_MAX_PAUSE_SECONDS = 2.0  # without work, after which the thread no longer works on its answer
_STARVED_CORES = 0.2  # wanted by the listener: it waits for a core, not for the GIL
_MAX_PEERS = 64


def examine(run: Path, progress: Progress, limit: float, rank: int) -> Iterator[Stall | None]:
    """Examine a process. Yields None until it is done, then the `Stall`."""
    begun = time.monotonic()
    pids = tree.pids(progress.pid)
    asked = [pid for pid in pids if questions.ask(run, pid)]
    pressure = host_pressure.read(progress.pid, pids)
    peers = Peers(run, pids)
    files = open_files.sizes(pids, run)
    before = tree.tree(progress.pid)
    yield from _until(begun + _LOOK_SECONDS)
    after = waits.with_waits(tree.compare_all(before, tree.tree(progress.pid)))
    after = open_files.with_growth(after, files, open_files.sizes(pids, run))
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
        mute=tuple(view.pid for view in mute),
        peers=peers.seen(),
        outsiders=waits.at_other_ends(after),
        above=waits.above(progress.pid),
        raised={view.pid: place for view in after if view.state in "ZX" and (place := _raised(run, rank, view.pid))},
    )


def _raised(run: Path, rank: int, pid: int) -> Location | None:
    """Where a child that has ended raised its exception, as it told itself."""
    told = [each for each in read_diagnoses(run / f"rank{rank}.{pid}").values() if each.severity == "error"]
    return told[-1].cause_location if told else None


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


class Answers:
    """The answers of the processes that were asked."""

    def __init__(self, run: Path, asked: Iterable[int]) -> None:
        self._run = run
        self._asked = frozenset(asked)
        # By process: CPU time of its listener, and when that last rose.
        self._worked: dict[int, tuple[float, float]] = {}

    def heard(self, pid: int) -> bool:
        """Whether a process has heard the question, which means that its GIL was free."""
        return questions.heard(self._run, pid).exists()

    def pending(self, views: Iterable[ProcessView], passed: float) -> bool:
        """Whether an answer may still come, `passed` seconds after the question."""
        return any(self._may_answer(view, passed) for view in views if view.pid in self._asked)

    def _may_answer(self, view: ProcessView, passed: float) -> bool:
        answer = questions.read_answer(self._run, view.pid)
        if answer is not None and (not answer.partial or passed > _MAX_UNHEARD_SECONDS):
            return False  # the device may never answer
        if view.state in "TtZX":
            return False
        if self.heard(view.pid):
            return passed < _MAX_ANSWER_SECONDS or (passed < _MAX_WORKING_SECONDS and self._is_working(view.pid))
        starved = view.listener is not None and (view.listener.demand or 0.0) > _STARVED_CORES
        return passed < (_MAX_ANSWER_SECONDS if starved else _MAX_UNHEARD_SECONDS)

    def _is_working(self, pid: int) -> bool:
        """Whether the thread works on its answer, or waits for a core."""
        now = process.read(pid)
        listener = now.listener if now is not None else None
        if listener is None:
            return False
        before, since = self._worked.get(pid, (-1.0, 0.0))
        if listener.cpu > before or listener.state == "R":
            self._worked[pid] = listener.cpu, time.monotonic()
            return True
        return time.monotonic() - since < _MAX_PAUSE_SECONDS


class Peers:
    """The peers of a process: asked at the beginning of an examination, read at its end."""

    def __init__(self, run: Path, own: Iterable[int]) -> None:
        self._run = run
        family = set(own)
        views = [process.read(pid) for pid in _candidates(run, family) if pid not in family]
        self._before = [view for view in views if view is not None and not view.is_loader_worker][:_MAX_PEERS]
        self._began = time.time()
        self._asked = {view.pid for view in self._before if questions.ask(run, view.pid, questions.GLANCE)}

    @property
    def pending(self) -> bool:
        """Whether a peer has not answered yet."""
        return any(self._answer(pid) is None for pid in self._asked)

    def seen(self) -> tuple[Peer, ...]:
        if not self._before:
            return ()
        updates = _updates(self._run)
        later = [view for each in self._before if (view := process.read(each.pid)) is not None]
        compared = tree.compare_all(self._before, later)
        return tuple(self._peer(view, updates) for view in compared if view.state not in "ZX")

    def _peer(self, view: ProcessView, updates: dict[int, int]) -> Peer:
        return Peer(
            process=sleeps.with_sleeps(view),
            asked=view.pid in self._asked,
            inside=self._answer(view.pid) if view.pid in self._asked else None,
            updates=updates.get(view.pid),
        )

    def _answer(self, pid: int) -> InsideView | None:
        answer = questions.read_answer(self._run, pid)
        return answer if answer is not None and answer.time >= self._began else None


def _candidates(run: Path, family: set[int]) -> list[int]:
    """All processes that listen, and the children of the same launcher, which may still be importing torch."""
    found = dict.fromkeys(questions.listeners(run))
    parents = {view.parent for pid in family if (view := process.read(pid)) is not None} - family
    for parent in parents - {0, 1, os.getpid()}:
        found.update(dict.fromkeys(tree.pids(parent)[1:]))
    return [pid for pid in found if os.path.exists(f"/proc/{pid}")]


def _updates(run: Path) -> dict[int, int]:
    """Optimizer updates of each process, from its black box."""
    boxes = map(read_box, layout.process_folders(run))
    return {box.pid: box.last.updates for box in boxes if box is not None and box.last is not None}
