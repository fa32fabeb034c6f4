"""The ranks of a job that goes on, compared with each other: mistakes that raise nothing."""

from __future__ import annotations

import time
from pathlib import Path

from torchmedic.detect.ranks.messages import is_misread
from torchmedic.records import BoxContents, Diagnosis
from torchmedic.records.rank_facts import JobFacts, RankFacts
from torchmedic.runfolder import events, layout
from torchmedic.supervise import ranks
from torchmedic.supervise.boxes import read_box
from torchmedic.supervise.folder_news import FolderNews

_MAX_BOX_SECONDS = 1.0


class RankComparison:
    """Compares the facts that the ranks of a run have written; every finding is told by one parent, once."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._news = FolderNews()
        self._folders: list[Path] = []  # as they were last listed
        self._facts: dict[Path, RankFacts] = {}

    def new(self, *, at_end: bool = False) -> list[Diagnosis]:
        """The findings that nobody has told yet. `at_end`: this run has ended well, and its logs are complete."""
        changed = False
        if at_end or self._news.may_have_changed(self._run):
            self._folders = layout.process_folders(self._run)
        for folder in self._folders:
            if at_end or self._news.may_have_changed(folder):
                found = ranks.read_facts(folder)
                if found is not None and found != self._facts.get(folder):
                    self._facts[folder] = found
                    changed = True
        known = sorted(self._facts.values(), key=lambda each: each.rank)
        is_whole = bool(known) and [each.rank for each in known] == list(range(known[0].world_size))
        if not is_whole or not (changed or at_end):
            return []
        return [found for found in self._asked(tuple(known), at_end) if ranks.claim(self._run, found.code)]

    def _asked(self, known: tuple[RankFacts, ...], at_end: bool) -> list[Diagnosis]:
        from torchmedic.diagnose import registry
        from torchmedic.diagnose.engine import ask, ask_each

        moments = {self._facts[folder].rank: box.moments for folder, box in self._boxes(at_end).items()}
        job = ranks.read_job(self._run)
        ended = at_end and job is not None and all(state.fate == "ended" for state in job.ranks)
        found = job.difference if job is not None else None
        if job is not None and found is not None and found.call is not None and found.expected is not None:
            # The ranks have gone different ways: what their training has in common is over.
            told = ask(job, registry.RANKS) if is_misread(found.call, found.expected) else None
            return [told] if told is not None else []
        if any(isinstance(line, events.ExceptionLine) for folder in self._facts for line in events.read_events(folder)):
            return []  # what differs after an exception, such as weights after half an exchange, is its echo
        logs = tuple(state.log for state in job.ranks if state.log is not None) if job is not None else ()
        return ask_each(JobFacts(ranks=known, logs=logs, ended=ended, moments=moments), registry.COMPARED)

    def _boxes(self, at_end: bool) -> dict[Path, BoxContents]:
        """The black boxes of all ranks. The parent of a rank that has just ended is about to write its box."""
        end = time.monotonic() + (_MAX_BOX_SECONDS if at_end else 0.0)
        while True:
            found = {folder: box for folder in self._facts if (box := read_box(folder)) is not None}
            if len(found) == len(self._facts) or time.monotonic() >= end:
                return found
            time.sleep(0.05)
