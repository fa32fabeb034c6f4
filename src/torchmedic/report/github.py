"""A diagnosis as annotations of GitHub Actions, and a report as the summary of a job."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torchmedic.records import Diagnosis, Location, Report, Treatment
from torchmedic.records.plain_text import clipped, one_line, visible
from torchmedic.report import markdown, terminal

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_MAX_MESSAGE = 4000  # characters; GitHub drops longer annotations
_MAX_SUMMARY = 512 * 1024  # bytes; GitHub refuses a summary above 1 MiB, and other steps write there too


def annotation(diagnosis: Diagnosis) -> str:
    """One workflow command; GitHub shows it at the file and line of the cause."""
    command = _COMMANDS[diagnosis.severity]
    properties = {"title": f"{diagnosis.code} {diagnosis.name}"}
    place = diagnosis.cause_location or next(iter(diagnosis.locations), None)
    if place is not None:
        properties |= _position(place)
    given = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{command} {given}::{_data(clipped(_message(diagnosis), _MAX_MESSAGE))}"


def _position(place: Location) -> dict[str, str]:
    found = {"file": place.file, "line": str(place.line)}
    if place.end_column > place.column:
        # GitHub's last column is inclusive.
        found |= {"col": str(place.column), "endColumn": str(place.end_column - 1)}
    return found


def _message(diagnosis: Diagnosis) -> str:
    lines = [diagnosis.message, f"{diagnosis.grade}: {diagnosis.cause}"]
    lines += [f"note: {fact}" for fact in diagnosis.evidence]
    lines += [_help(treatment) for treatment in diagnosis.treatments]
    return "\n".join(visible(line) for line in lines)


def _help(treatment: Treatment) -> str:
    proof = f" [{terminal.proof(treatment)}]" if treatment.proven else ""
    return f"help: {treatment.title}{proof}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(one_line(text)).replace(":", "%3A").replace(",", "%2C")


def write_summary(report: Report, shown: Iterable[Diagnosis]) -> None:
    """Append the report to the summary of the job, if this is one of GitHub Actions."""
    path = os.environ.get(SUMMARY_VARIABLE)
    text = markdown.document(report, shown).encode("utf-8", "replace")
    if path and len(text) <= _MAX_SUMMARY:
        with Path(path).open("ab") as file:
            file.write(text + b"\n")
