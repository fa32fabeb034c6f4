"""How long the answer of a process is waited for: as long as the thread that has to give it gets on with it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from torchmedic.records.process import ProcessView
from torchmedic.runfolder import questions
from torchmedic.supervise.proc import process

_ANSWER = 2.2  # seconds until a process that has not heard the question is taken to be unable to
_LONGEST = 8.0  # seconds that an answer may take, or the question on its way to who gets no core
_AT_IT = 60.0  # seconds that it may take on a machine that is taken, as long as the thread gets on with it
_PAUSE = 2.0  # seconds without work after which it does not
_STARVED = 0.2  # of a core that the listener wanted and did not get: it is not the GIL that it waits for


class Answers:
    """Of the processes that were asked."""

    def __init__(self, run: Path, asked: Iterable[int]) -> None:
        self._run = run
        self._asked = frozenset(asked)
        self._worked: dict[
            int, tuple[float, float]
        ] = {}  # the CPU time of a listener, and when it was last seen to rise

    def heard(self, pid: int) -> bool:
        """Whether a process has heard the question: then its GIL was to be had."""
        return questions.heard(self._run, pid).exists()

    def pending(self, views: Iterable[ProcessView], passed: float) -> bool:
        """Whether an answer may still come, so many seconds after the question."""
        return any(self._may_answer(view, passed) for view in views if view.pid in self._asked)

    def _may_answer(self, view: ProcessView, passed: float) -> bool:
        answer = questions.read_answer(self._run, view.pid)
        if answer is not None and (not answer.partial or passed > _ANSWER):
            return False  # a device that does not answer may never do so
        if view.state in "TtZX":
            return False
        if self.heard(view.pid):
            return passed < _LONGEST or (passed < _AT_IT and self._is_at_it(view.pid))
        starved = view.listener is not None and (view.listener.demand or 0.0) > _STARVED
        return passed < (_LONGEST if starved else _ANSWER)

    def _is_at_it(self, pid: int) -> bool:
        """Whether the thread works on its answer, or waits for a core."""
        now = process.read(pid)
        listener = now.listener if now is not None else None
        if listener is None:
            return False
        before, since = self._worked.get(pid, (-1.0, 0.0))
        if listener.cpu > before or listener.state == "R":
            self._worked[pid] = listener.cpu, time.monotonic()
            return True
        return time.monotonic() - since < _PAUSE
