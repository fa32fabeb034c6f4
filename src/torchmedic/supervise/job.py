"""One report for several ranks that each run under their own torchmedic (`torchrun ... -m torchmedic run`).

The ranks of one machine share a run folder. Each rank writes its part and merges all parts into `report.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from torchmedic.contained import contained
from torchmedic.diagnose.registry import is_silent
from torchmedic.records import Diagnosis, Outcome, RankEnd, Report
from torchmedic.records.ranks import RankState
from torchmedic.runfolder import files, layout
from torchmedic.runfolder.confidential import shown
from torchmedic.source.user_code import relative
from torchmedic.supervise import ranks

_NAMES_RANK = re.compile(r"\branks? \d|\b\d+ (?:of \d+ )?ranks\b|\ball ranks\b")


class Ledger:
    """The `report.json` of a run, which several ranks may share. What it shows is what others may see of the run.

    `work` is the folder in which the processes of the run work, `run` the folder of the report.
    """

    def __init__(self, work: Path, rank: int | None, run: Path | None = None, confidential: bool = False) -> None:
        self._work = work
        self.run = run or work
        self._rank = rank
        self._confidential = confidential

    def shown(self, diagnosis: Diagnosis) -> Diagnosis:
        """A diagnosis as it may be printed, and written to the run folder. In a job, its message names the rank.

        A mistake that raises nothing is one of the script, which all ranks run: its rule names ranks where they differ.
        """
        found = shown(diagnosis) if self._confidential else diagnosis
        if is_silent(found) or _NAMES_RANK.search(found.message) or not self.is_of_job:
            return found
        return replace(found, message=f"rank {found.rank}: {found.message}")

    @property
    def is_of_job(self) -> bool:
        """Whether the run is one of several ranks."""
        return self._rank is not None or len({ranks.rank_of(each) for each in layout.process_folders(self._work)}) > 1

    def publish(self, report: Report) -> frozenset[object]:
        """Write the report, and return the keys (`same_finding`) of what other ranks have found."""
        if self._rank is None:
            self._write(replace(report, diagnoses=_once(report.diagnoses)))
            return frozenset()
        with layout.locked(self._work / ".lock"):
            parts = files.write_part(self._work, self._rank, report)
            self._write(merged(parts))
        return frozenset(
            same_finding(found)
            for part in parts
            if part != report
            for found in part.diagnoses
            if found.rank != self._rank
        )

    def _write(self, report: Report) -> None:
        ends = _ends(self._work, report.diagnoses) or ()
        if self._confidential:
            ends = tuple(replace(each, file="", line=0) for each in ends)
        files.write_report(self.run, replace(report, diagnoses=tuple(map(self.shown, report.diagnoses)), ranks=ends))


@contained("supervise.ranks")
def _ends(work: Path, diagnoses: tuple[Diagnosis, ...]) -> tuple[RankEnd, ...]:
    """What became of each rank of a job with an error."""
    error = next((found for found in diagnoses if found.severity == "error" and not is_silent(found)), None)
    known = ranks.read_job(work) if error is not None else None
    if error is None or known is None:
        return ()
    culprits = {error.rank} | {
        ranks.rank_of(folder)
        for folder in layout.process_folders(work)
        for found in files.read_diagnoses(folder).values()
        if same_finding(found) == same_finding(error)
    }
    if known.difference is not None and error.rank in known.difference.culprits:
        culprits.update(known.difference.culprits)
    return tuple(_end(known.of(rank) or RankState(rank=rank), rank in culprits) for rank in range(known.world_size))


def _end(state: RankState, is_culprit: bool) -> RankEnd:
    last = state.log.calls[-1] if state.log is not None and state.log.calls else None
    place = last.frames[0] if last is not None and last.frames else None
    return RankEnd(
        rank=state.rank,
        part="culprit" if is_culprit else "victim",
        fate=state.fate,
        signal=state.signal,
        op=last.op if last is not None else "",
        file=relative(place.file) if place is not None else "",
        line=place.line if place is not None else 0,
    )


def same_finding(diagnosis: Diagnosis) -> object:
    """A key that is equal for the same finding on several ranks."""
    place = diagnosis.cause_location
    return (diagnosis.code, None if place is None else (place.file, place.line))


def merged(parts: list[Report]) -> Report:
    """Merge the reports of several ranks. The outcome is of the first rank with a diagnosis, else with a bad status."""
    telling = [part for part in parts if part.diagnoses] + [part for part in parts if part.outcome.exit_status] + parts
    outcome = telling[0].outcome if telling else Outcome()
    return Report(
        outcome=replace(outcome, steps=max((part.outcome.steps for part in parts), default=0)),
        diagnoses=_once(diagnosis for part in parts for diagnosis in part.diagnoses),
    )


def _once(diagnoses: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Drop what several ranks have found alike; the first of these ranks keeps it."""
    first: dict[object, int] = {}
    return tuple(each for each in diagnoses if first.setdefault(same_finding(each), each.rank) == each.rank)
