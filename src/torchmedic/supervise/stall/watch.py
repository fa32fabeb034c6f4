"""Watches the progress of all training processes: which make none, which were examined, which have resumed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

from torchmedic.errors import UnreadableRun
from torchmedic.records import Diagnosis
from torchmedic.records.stall import Stall
from torchmedic.runfolder import layout, questions
from torchmedic.supervise import ranks
from torchmedic.supervise.boxes import box_path
from torchmedic.supervise.folder_news import FolderNews
from torchmedic.supervise.host.watch import HostWatch
from torchmedic.supervise.proc import tree
from torchmedic.supervise.proc.process import is_alive
from torchmedic.supervise.stall.examination import examine
from torchmedic.supervise.stall.progress import Progress

_INTERVAL_SECONDS = 1.0
_SLACK_SECONDS = 0.05  # a look may come a little early
_SHORT_INTERVAL_SECONDS = 0.5  # if the user's limit is short
_SHORT_LIMIT_SECONDS = 10.0
_MAX_EXAMINATION_SECONDS = 300.0  # that torchmedic's own examination of a failed step may take
_REPEAT_FACTOR = 2.0  # a process that was found to move is examined again after this many times as long


class Case:
    """One process, from the moment it makes no progress until it resumes."""

    def __init__(self, progress: Progress, rank: int, limit: float) -> None:
        self.progress = progress
        self.rank = rank
        self.limit = limit
        self.next = limit
        self.examination: Iterator[Stall | None] | None = None
        self.said: Diagnosis | None = None
        self.noted: set[tuple[str, str]] = set()
        self.notes: list[Diagnosis] = []  # diagnoses that say that it is not hung


class StallWatch:
    """Looks at all processes about once a second, which takes less than a thousandth of a core in a healthy run."""

    def __init__(self, run: Path, rank: int | None, stall_after: float | None) -> None:
        self._run = run
        self._rank = rank
        self._wanted = stall_after
        self._followed: dict[Path, Progress] = {}
        self._cases: dict[int, Case] = {}
        self._due = 0.0
        self._patience = 0.0  # seconds until a process that makes progress now can have stalled
        is_short = stall_after is not None and stall_after < _SHORT_LIMIT_SECONDS
        self._interval = _SHORT_INTERVAL_SECONDS if is_short else _INTERVAL_SECONDS
        self._resumed: list[tuple[Diagnosis, float]] = []
        self._news = FolderNews()
        self._without_box = False  # a folder is new, and its process has no black box yet

    @property
    def is_calm(self) -> bool:
        """Whether all processes make progress, and a look before `patience` has passed is needed by nobody."""
        return not self._cases and self._interval >= _INTERVAL_SECONDS

    @property
    def patience(self) -> float:
        return max(self._interval, self._patience)

    def look(self, host: HostWatch) -> Iterator[tuple[Case, Stall]]:
        """The examinations that have finished since the last look."""
        for case in list(self._cases.values()):
            if case.examination is not None:
                seen = next(case.examination, None)
                if seen is not None:
                    case.examination = None
                    if case.progress.look():  # it resumed during the examination
                        self._go_on(case)
                    else:
                        yield case, seen
        now = time.monotonic()
        if now < self._due or self._wanted == 0:
            return
        self._due = now + self._interval - _SLACK_SECONDS
        self._follow()
        self._judge(host)

    def resumed(self) -> list[tuple[Diagnosis, float]]:
        """Diagnoses of processes that have resumed since, and after how many seconds."""
        found, self._resumed = self._resumed, []
        return found

    def last_look(self) -> None:
        """Called after the end of the run. A process that was reported and has ended by itself has resumed."""
        for case in list(self._cases.values()):
            silence = case.progress.still(time.time())
            if case.progress.look() or case.progress.ended:
                self._go_on(case, silence)

    def _follow(self) -> None:
        if not self._news.may_have_changed(self._run) and not self._without_box:
            return
        self._without_box = False
        for folder in layout.process_folders(self._run):
            if folder in self._followed or (self._rank is not None and layout.rank_of(folder) != self._rank):
                continue
            with contextlib.suppress(UnreadableRun):
                box = box_path(folder)
                if box is not None:
                    self._followed[folder] = Progress(box, time.time())
                else:
                    self._without_box = True

    def _judge(self, host: HostWatch) -> None:
        moving: set[int] = set()
        self._patience = math.inf
        silent: list[tuple[Path, Progress]] = []
        for folder, progress in self._followed.items():
            case = self._cases.get(progress.pid)
            if progress.look() and case is not None:
                self._go_on(case)
            left = progress.limit(self._wanted) - progress.still(time.time())
            if progress.ended or not is_alive(progress.pid):
                self._cases.pop(progress.pid, None)
            elif left > 0 or self._is_examined(progress.pid):
                moving.add(progress.pid)
                self._patience = min(self._patience, left)
            else:
                silent.append((folder, progress))
        for folder, progress in silent:
            # A process that does not train waits for its children that do. If they make no progress, they explain why.
            others = moving if progress.trains else moving | {each.pid for _, each in silent if each is not progress}
            if others and not others.isdisjoint(tree.pids(progress.pid)):
                continue
            case = self._cases.get(progress.pid)
            if case is None:
                limit = progress.limit(self._wanted)
                case = self._cases[progress.pid] = Case(progress, ranks.rank_of(folder), limit)
            if case.examination is None and case.said is None and progress.still(time.time()) >= case.next:
                host.look_closely_at_gpus()
                case.next = _REPEAT_FACTOR * max(case.next, progress.still(time.time()))
                case.examination = examine(self._run, progress, case.limit, case.rank)

    def _is_examined(self, pid: int) -> bool:
        """Whether torchmedic itself holds a process up, for a limited time."""
        with contextlib.suppress(OSError):
            return time.time() - questions.busy(self._run, pid).stat().st_mtime < _MAX_EXAMINATION_SECONDS
        return False

    def _go_on(self, case: Case, silence: float = 0.0) -> None:
        self._cases.pop(case.progress.pid, None)
        if case.said is not None:
            self._resumed.append((case.said, case.progress.last_silence or silence))
