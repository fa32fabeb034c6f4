"""What the processes of a run have found out about themselves, and which of it is the root and which an echo."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torchmedic import rundir
from torchmedic.records import Diagnosis
from torchmedic.supervise.job import same_finding

_UNEXPLAINED = "TM900"
_KILLED = "TM805"
_WORKER_GONE = "TM822"
_SHARED = ("TM414", "TM415")


class Findings:
    """The diagnoses in the folders of a run; only those of one rank where other ranks have a parent of their own."""

    def __init__(self, run: Path, rank: int | None) -> None:
        self._run = run
        self._rank = rank
        self._seen: set[Path] = set()
        self._full: set[object] = set()  # where a limit of the host was said to be reached
        self._waiting: dict[Path, Diagnosis] = {}

    def folders(self) -> list[Path]:
        """The folders that are ours to report on."""
        found = rundir.process_folders(self._run)
        return found if self._rank is None else [folder for folder in found if rundir.rank_of(folder) == self._rank]

    def _workers(self) -> list[Path]:
        found = rundir.worker_folders(self._run)
        return found if self._rank is None else [folder for folder in found if rundir.rank_of(folder) == self._rank]

    def new(self) -> list[Diagnosis]:
        """What has been explained since the last look. What may be an echo of a death waits for the end."""
        found = []
        for folder in [*self._workers(), *self.folders()]:
            for path, diagnosis in rundir.read_diagnoses(folder).items():
                if path in self._seen:
                    continue
                self._seen.add(path)
                if diagnosis.code in _SHARED:
                    # All workers of a loader run into it at about the same time.
                    known = (diagnosis.rank, same_finding(diagnosis))
                    if known in self._full:
                        continue
                    self._full.add(known)
                if diagnosis.code in (_UNEXPLAINED, _WORKER_GONE):
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
            for folder in rundir.process_folders(self._run)
            for path, diagnosis in rundir.read_diagnoses(folder).items()
            if diagnosis.severity == "error"
        }
        if not everyone:
            return []
        explained = {path.parent for path, diagnosis in everyone.items() if diagnosis.code != _UNEXPLAINED}
        first = same_finding(everyone[min(everyone, key=_written)])
        return [
            diagnosis
            for path, diagnosis in self._waiting.items()
            if diagnosis.code == _UNEXPLAINED
            and not explained - {path.parent}
            and (same_finding(diagnosis) == first or path.parent in explained)
        ]


def _written(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
