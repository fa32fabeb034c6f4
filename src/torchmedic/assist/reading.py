"""Tools that only read: reports, explanations, source lines."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Literal

from torchmedic.errors import UnreadableRun, UsageError
from torchmedic.records import Diagnosis, Location, Report
from torchmedic.records.plain_text import visible
from torchmedic.runfolder import files
from torchmedic.runfolder.confidential import is_confidential

ReportFormat = Literal["prompt", "markdown", "json", "concise"]

_MAX_CONTEXT_LINES = 40
_MAX_LOCATIONS = 8
_MAX_FILE_BYTES = 4 << 20


def run_folder(run: str, base: Path) -> Path:
    """The folder of a run: the one that is named, or the newest below `.torchmedic`.

    Raises:
        UsageError: There is no run.
    """
    if run:
        return base / run
    runs = [path.parent for path in (base / ".torchmedic").glob(f"*/{files.REPORT}")]
    if not runs:
        raise UsageError(f"there is no run below {base / '.torchmedic'}: name a run folder")
    return max(runs, key=lambda path: (path / files.REPORT).stat().st_mtime)


def report_text(folder: Path, style: ReportFormat = "prompt", tokens: int = 1500) -> str:
    """The diagnoses of a run as text. Raises UnreadableRun if the folder holds no report."""
    from torchmedic.report import formats
    from torchmedic.supervise.abandoned import read_report

    report = read_report(folder)
    shown = [each for each in report.diagnoses if each.severity != "note"]
    lines = [line for each in shown if (line := formats.line(each, style)) is not None]
    document = formats.document(report, style, folder, tokens=tokens)
    text = visible("".join(f"{line}\n" for line in lines) + document)
    return text or f"nothing was found: {report.outcome.steps} steps, exit status {report.outcome.exit_status}"


def explanation(code: str) -> str:
    """What a code means, why it happens, and how it is cured; the list of all codes if `code` is empty.

    Raises:
        UsageError: There is no such code.
    """
    from torchmedic.diagnose import catalogue

    if not code:
        return "\n".join(f"{each.code} {each.name}: {each.summary}" for each in catalogue.entries())
    found = catalogue.find(code)
    if found is None:
        raise UsageError(f"there is no diagnosis {code}")
    return f"{found.code} {found.name}\n\n{found.doc}"


def incident(report: Report, number: int) -> Diagnosis:
    """A diagnosis by its place in the report. Raises UsageError if there is no such diagnosis."""
    if not 0 <= number < len(report.diagnoses):
        raise UsageError(f"there is no incident {number}: the run has {len(report.diagnoses)}, counted from 0")
    return report.diagnoses[number]


def source_context(folder: Path, base: Path, number: int, lines: int) -> str:
    """The source around every place that a diagnosis names.

    Read are only Python files that the report names and that lie below `base`. A report that somebody has mailed may
    name any file of this machine, or be a link to one.

    Raises:
        UsageError: There is no such diagnosis.
        UnreadableRun: The run is confidential.
    """
    if is_confidential(folder):
        raise UnreadableRun("the run was started with --confidential and names no files")
    found = incident(files.read_report(folder), number)
    around = max(0, min(lines, _MAX_CONTEXT_LINES))
    parts = [_context(place, base, around) for place in found.locations[:_MAX_LOCATIONS]]
    return visible("\n\n".join(parts)) or f"{found.code} names no place in the source"


def _context(place: Location, base: Path, around: int) -> str:
    path = base / place.file
    head = f"{place.file}:{place.line} ({place.role}{': ' + place.label if place.label else ''})"
    try:
        real = path.resolve()
        if not real.is_relative_to(base.resolve()):
            return f"{head}\nthe file is outside of {base}"
        if real.suffix != ".py" or real.stat().st_size > _MAX_FILE_BYTES:
            return head
        is_file = real.is_file()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        is_file = False
    if not is_file:
        return f"{head}\nthe file is not there"
    linecache.checkcache(str(path))
    text = linecache.getlines(str(path))
    if not 0 < place.line <= len(text):
        return f"{head}\nthe file has no such line any more"
    changed = place.code and text[place.line - 1].strip() != place.code.strip()
    first, last = max(1, place.line - around), min(len(text), place.line + around)
    shown = [
        f"{'>' if number == place.line else ' '} {number:>5} {text[number - 1].rstrip()}"
        for number in range(first, last + 1)
    ]
    note = ["note: the line has changed since the run"] if changed else []
    return "\n".join([head, *note, *shown])
