"""What the processes of a run have found out about themselves, and which of it is the root and which an echo."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from torchmedic.diagnose.registry import is_fallback, is_silent
from torchmedic.errors import UnreadableRun
from torchmedic.observe.step import blackbox
from torchmedic.records import Diagnosis
from torchmedic.runfolder import files, layout
from torchmedic.supervise.folder_news import News
from torchmedic.supervise.job import same_finding
from torchmedic.supervise.proc import process

_KILLED = "TM805"
_WORKER_GONE = "TM822"
_SHARED = ("TM414", "TM415")
_PATIENCE = 10.0  # seconds that the parents of other ranks may take


class Findings:
    """The diagnoses in the folders of a run; only those of one rank where other ranks have a parent of their own."""

    def __init__(self, run: Path, rank: int | None) -> None:
        self._run = run
        self._rank = rank
        self._seen: set[Path] = set()
        self._news = News()
        self._known: list[Path] = []  # folders, as they were last listed
        self._full: set[object] = set()  # where a limit of the host was said to be reached
        self._waiting: dict[Path, Diagnosis] = {}

    def folders(self) -> list[Path]:
        """The folders that are ours to report on."""
        found = layout.process_folders(self._run)
        return found if self._rank is None else [folder for folder in found if layout.rank_of(folder) == self._rank]

    def _workers(self) -> list[Path]:
        found = layout.worker_folders(self._run)
        return found if self._rank is None else [folder for folder in found if layout.rank_of(folder) == self._rank]

    def new(self, *, at_end: bool = False) -> list[Diagnosis]:
        """What has been explained since the last look. What may be an echo of a death waits for the end."""
        found = []
        if at_end:
            self._news = News()
        if self._news.may_be_in(self._run):
            self._known = [*self._workers(), *self.folders()]
        for folder in self._known:
            if not self._news.may_be_in(folder):
                continue
            for path, diagnosis in files.read_diagnoses(folder, self._seen).items():
                self._seen.add(path)
                if diagnosis.code in _SHARED:
                    # All workers of a loader run into it at about the same time.
                    known = (diagnosis.rank, same_finding(diagnosis))
                    if known in self._full:
                        continue
                    self._full.add(known)
                if is_fallback(diagnosis) or diagnosis.code == _WORKER_GONE:
                    self._waiting[path] = diagnosis
                else:
                    found.append(diagnosis)
        return found

    def roots(self, deaths: list[Diagnosis]) -> list[Diagnosis]:
        """Of the deaths and of what waited for the end, that which the rest is an echo of."""
        gone = [diagnosis for diagnosis in self._waiting.values() if diagnosis.code == _WORKER_GONE]
        if gone and all(death.code == _KILLED for death in deaths):
            return gone  # the main process knows what the worker was reading; from outside it was just killed
        return deaths or [*gone, *self._unexplained()]

    def _unexplained(self) -> list[Diagnosis]:
        """What nobody could explain and is nobody's echo.

        Where one process of a run fails, others fail because of it: launchers, peers that lose their connection.
        So this is told only where no other process explains it, and then only what came first.
        """
        everyone = {
            path: diagnosis
            for folder in layout.process_folders(self._run)
            for path, diagnosis in files.read_diagnoses(folder).items()
            if diagnosis.severity == "error" and not is_silent(diagnosis)
        }
        ours = {path: found for path, found in self._waiting.items() if is_fallback(found)}
        if not everyone or not ours or (self._rank is not None and _told_by_others(self._run, self._rank)):
            return []
        explained = {path.parent for path, diagnosis in everyone.items() if _explains(diagnosis)}
        first = same_finding(everyone[min(everyone, key=_written)])
        return [
            diagnosis
            for path, diagnosis in ours.items()
            if not explained - {path.parent} and (same_finding(diagnosis) == first or path.parent in explained)
        ]


def _explains(diagnosis: Diagnosis) -> bool:
    """Whether it can be why another process has failed: mistakes that raise nothing are not."""
    return not is_fallback(diagnosis) and not is_silent(diagnosis)


def _written(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _told_by_others(run: Path, rank: int) -> bool:
    """Whether another rank has an error that is explained. Who watches one that has died may be about to tell."""
    end = time.monotonic() + _PATIENCE
    while not (told := any(map(_explains, files.errors_of_others(run, rank)))):
        others = (folder for folder in layout.process_folders(run) if layout.rank_of(folder) != rank)
        if time.monotonic() > end or not any(_is_open(run, folder) for folder in others):
            break
        time.sleep(0.1)
    return told


def _is_open(run: Path, folder: Path) -> bool:
    """Whether a process is gone without a word, and its parent has not said yet how it ended."""
    with contextlib.suppress(UnreadableRun):
        box = blackbox.read(folder / files.BLACK_BOX)
        view = process.read(box.pid)
        gone = view is None or view.state in "ZX"
        return gone and not box.clean_exit and not files.is_concluded(run, layout.rank_of(folder))
    return False
