"""The diagnoses that the processes of a run wrote about themselves, and which of them are root causes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from torchmedic.diagnose.registry import is_fallback, is_silent
from torchmedic.records import Diagnosis
from torchmedic.runfolder import events, files, layout
from torchmedic.supervise.boxes import read_box
from torchmedic.supervise.exchanged_numbers import ExchangedNumbers
from torchmedic.supervise.folder_news import FolderNews
from torchmedic.supervise.job import same_finding
from torchmedic.supervise.proc import process

_KILLED = "TM805"
_WORKER_GONE = "TM822"
MODELS_DIFFER = "parameters-differ-between-ranks"  # or ranks that have met in different calls
_SHARED = ("TM414", "TM415")
_MAX_WAIT_SECONDS = 10.0  # for the supervisors of other ranks


class Findings:
    """The diagnoses in the folders of a run; those of one rank only where every rank has its own supervisor."""

    def __init__(self, run: Path, rank: int | None) -> None:
        self._run = run
        self._rank = rank
        self._seen: set[Path] = set()
        self._news = FolderNews()
        self._known: list[Path] = []  # folders, as they were last listed
        self._full: set[object] = set()  # places where a limit of the host was reported
        self._waiting: dict[Path, Diagnosis] = {}
        self._exchanged = ExchangedNumbers(run)

    def folders(self) -> list[Path]:
        """The process folders that this supervisor reports on."""
        return self._own(layout.process_folders(self._run))

    def _own(self, folders: list[Path]) -> list[Path]:
        return [folder for folder in folders if self._rank is None or layout.rank_of(folder) == self._rank]

    def new(self, *, at_end: bool = False) -> list[Diagnosis]:
        """The diagnoses since the last call. Possible echoes of a death are kept back for `roots`."""
        found = []
        if at_end:
            self._news = FolderNews()
        if self._news.may_have_changed(self._run):
            self._known = [*self._own(layout.worker_folders(self._run)), *self.folders()]
        for folder in self._known:
            if not self._news.may_have_changed(folder):
                continue
            for path, diagnosis in files.read_diagnoses(folder, self._seen).items():
                self._seen.add(path)
                if diagnosis.code in _SHARED:
                    # All workers of a loader reach the limit at about the same time.
                    known = (diagnosis.rank, same_finding(diagnosis))
                    if known in self._full:
                        continue
                    self._full.add(known)
                if is_fallback(diagnosis) or diagnosis.code == _WORKER_GONE or diagnosis.name == MODELS_DIFFER:
                    self._waiting[path] = diagnosis
                elif not self._exchanged.keeps(diagnosis):
                    found.append(diagnosis)
        return [*found, *self._exchanged.due(at_end=at_end)]

    def unjudged(self) -> list[Diagnosis]:
        """The diagnoses that were kept back, each of them once: nobody is going to compare them with deaths."""
        kept, self._waiting = list(self._waiting.values()), {}
        return kept

    def roots(self, deaths: list[Diagnosis]) -> list[Diagnosis]:
        """The root causes among the deaths and the diagnoses that were kept back."""
        gone = [diagnosis for diagnosis in self._waiting.values() if diagnosis.code == _WORKER_GONE]
        if gone and all(death.code == _KILLED for death in deaths):
            return gone  # the main process knows more: which item the worker was reading
        differing = [diagnosis for diagnosis in self._waiting.values() if diagnosis.name == MODELS_DIFFER]
        return differing or deaths or [*gone, *self._unexplained()]

    def _unexplained(self) -> list[Diagnosis]:
        """The unexplained failures that are no echo of another failure.

        One failed process makes others fail: launchers, and peers that lose their connection. So an unexplained failure
        is reported only if no other process explains it, and then only the first one.
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
    """Whether a diagnosis can be the reason why another process failed; mistakes that raise nothing cannot."""
    return not is_fallback(diagnosis) and not is_silent(diagnosis)


def _written(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _told_by_others(run: Path, rank: int) -> bool:
    """Whether another rank has an explained error. The supervisor of a dead rank may still be writing its report."""
    end = time.monotonic() + _MAX_WAIT_SECONDS
    while not (told := any(map(_explains, files.errors_of_others(run, rank)))):
        others = (folder for folder in layout.process_folders(run) if layout.rank_of(folder) != rank)
        if time.monotonic() > end or not any(_is_open(run, folder) for folder in others):
            break
        time.sleep(0.1)
    return told


def _is_open(run: Path, folder: Path) -> bool:
    """Whether a process died and its supervisor has not reported yet how it ended."""
    box = read_box(folder)
    if box is not None and box.clean_exit:
        return False
    # The supervisor writes the box of a dead process at the end.
    started = [line.pid for line in events.events_of(folder, "start", events.StartLine)]
    pids = started[:1] if box is None else [box.pid]
    if not pids:
        return False
    view = process.read(pids[0])
    return (view is None or view.state in "ZX") and not files.is_concluded(run, layout.rank_of(folder))
