"""The other processes of the run: the ranks of a job wait for each other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from torchmedic.records.inside import InsideView
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Peer
from torchmedic.runfolder import layout, questions
from torchmedic.supervise.boxes import read_box
from torchmedic.supervise.proc import process, sleeps, tree

_MAX_PEERS = 64


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
