"""Holders of the user's that grow and grow: each one is explained once, while the run goes on."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

from torchmedic.detect.trends.heap_growth import Growth
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask
from torchmedic.evidence.leaks.evidence import LeakEvidence
from torchmedic.examine.publication import Said, publish_silent
from torchmedic.observe.context import ReportingProcess
from torchmedic.observe.heap.growth_watch import Look
from torchmedic.records import Diagnosis
from torchmedic.runfolder.files import read_diagnoses
from torchmedic.runfolder.layout import worker_folders


def explain_growth(
    found: list[Growth], looks: list[Look], frame: FrameType, process: ReportingProcess, said: Said
) -> None:
    """Ask the rules about all growths first; then report each holder and each line once."""
    # If two findings are about one holder, the more specific one is reported.
    found.sort(key=lambda growth: not growth.held.inner)
    diagnoses = [
        (growth.held.name, diagnosis)
        for growth in found
        if (diagnosis := ask(LeakEvidence(growth, looks, frame, process), registry.GROWING)) is not None
    ]
    for name, diagnosis in diagnoses:
        known = said.has_line(diagnosis) or name in said.holders
        if not known and not _was_said_by_worker(diagnosis, process.run):
            said.holders.add(name)
            publish_silent(diagnosis, process, said)


def _was_said_by_worker(diagnosis: Diagnosis, run: Path) -> bool:
    """Whether a DataLoader worker has reported the finding: every pass may start new workers that find it again."""
    told = (found for folder in worker_folders(run) for found in read_diagnoses(folder).values())
    return any(
        found.cause_location is not None
        and diagnosis.cause_location is not None
        and (found.code, found.cause_location.line) == (diagnosis.code, diagnosis.cause_location.line)
        for found in told
    )
