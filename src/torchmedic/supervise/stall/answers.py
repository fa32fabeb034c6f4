"""Decides how long to wait for the answers of processes: as long as the answering thread makes progress."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from torchmedic.records.process import ProcessView
from torchmedic.runfolder import questions
from torchmedic.supervise.proc import process

_MAX_UNHEARD_SECONDS = 2.2  # after this, a process that has not heard the question cannot hear it
_MAX_ANSWER_SECONDS = 8.0  # for an answer, or for a question to a thread that gets no core
_MAX_WORKING_SECONDS = 60.0  # for an answer on a busy machine, while the thread works on it
_MAX_PAUSE_SECONDS = 2.0  # without work, after which the thread no longer works on its answer
_STARVED_CORES = 0.2  # wanted by the listener: it waits for a core, not for the GIL


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
