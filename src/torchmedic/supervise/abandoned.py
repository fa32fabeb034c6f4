"""A run whose torchmedic process was killed: nobody was left to write its report, so it is made on demand."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from torchmedic.diagnose.rules.process.killed import with_torchmedic
from torchmedic.errors import UnreadableRun
from torchmedic.records import Report
from torchmedic.runfolder import files
from torchmedic.supervise.boxes import read_box
from torchmedic.supervise.findings import Findings
from torchmedic.supervise.watching import lives


def read_report(run: Path) -> Report:
    """The report of a run; with its end, if nobody has written that.

    Raises:
        UnreadableRun: There is no report, and it cannot be made.
    """
    folder = run if run.is_dir() else run.parent
    supervisors = files.read_supervisors(folder)
    try:
        report = files.read_report(run)
    except UnreadableRun:
        if not supervisors:
            raise
        report = Report()
    if not supervisors or report.outcome.exit_status is not None:
        return report
    if any(lives(each.pid, each.time) for each in supervisors):
        return report  # the run goes on
    findings = Findings(folder, None)
    boxes = [box for each in findings.folders() if (box := read_box(each)) is not None and box.last is not None]
    latest = max(boxes, key=lambda box: box.last.time if box.last is not None else 0.0, default=None)
    known = set(report.diagnoses)
    found = [each for each in findings.new(at_end=True) if each not in known]
    end = with_torchmedic(supervisors[0].pid, latest).done()
    steps = latest.last.updates if latest is not None and latest.last is not None else 0
    outcome = replace(report.outcome, steps=steps, symptom="death")
    return files.accepted(Report(outcome=outcome, diagnoses=(*report.diagnoses, *found, end)), folder)
