"""Bad gradients that a rank got from the exchange with others: kept back until the rank that made them has spoken."""

from __future__ import annotations

import time
from pathlib import Path

from torchmedic.diagnose.registry import is_fallback, is_silent
from torchmedic.records import Diagnosis
from torchmedic.runfolder import files, layout
from torchmedic.supervise import ranks

_FROM_EXCHANGE = "nonfinite-from-exchange"
_MISREAD = "TM703"  # of a job that goes on: a message that is taken with another dtype
_MAX_WAIT_SECONDS = 15.0  # for another rank, which replays its own step meanwhile


class ExchangedNumbers:
    """Diagnoses that blame the exchange. One is reported if no rank has found a bad number of its own."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._kept: list[tuple[float, Diagnosis]] = []  # until when, on the monotonic clock

    def keeps(self, diagnosis: Diagnosis) -> bool:
        """Keep a diagnosis back if it blames the exchange."""
        if diagnosis.name != _FROM_EXCHANGE:
            return False
        self._kept.append((time.monotonic() + _MAX_WAIT_SECONDS, diagnosis))
        return True

    def due(self, *, at_end: bool = False) -> list[Diagnosis]:
        """The diagnoses that are to be reported now: the wait is over, or all ranks blame the exchange."""
        if ranks.is_told(self._run, _MISREAD):
            self._kept.clear()
        while self._kept:
            found = self._found()
            own = [each for ranks in found.values() for each in ranks if each.name != _FROM_EXCHANGE]
            self._kept = [(end, kept) for end, kept in self._kept if not any(_explains(each, kept) for each in own)]
            agreed = all(found.values())
            due = [kept for end, kept in self._kept if agreed or time.monotonic() > end]
            if due or not at_end:
                self._kept = [(end, kept) for end, kept in self._kept if kept not in due]
                return due
            time.sleep(0.1)
        return []

    def _found(self) -> dict[int, list[Diagnosis]]:
        """The errors of every rank."""
        found: dict[int, list[Diagnosis]] = {}
        for folder in layout.process_folders(self._run):
            ours = (each for each in files.read_diagnoses(folder).values() if each.severity == "error")
            found.setdefault(ranks.rank_of(folder), []).extend(each for each in ours if not is_silent(each))
        return found


def _explains(own: Diagnosis, kept: Diagnosis) -> bool:
    """Whether another rank's finding is the origin of what the exchange has spread."""
    is_earlier = own.step is None or kept.step is None or own.step <= kept.step
    return own.rank != kept.rank and not is_fallback(own) and is_earlier
