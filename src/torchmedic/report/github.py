"""A report in Markdown (for a pull request, an issue, the summary of a job), and annotations of GitHub Actions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchmedic.records import Diagnosis, Location, Outcome, Report, Treatment
from torchmedic.records.plain_text import clipped, one_line, visible
from torchmedic.report import terminal

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_MAX_MESSAGE = 4000  # characters; GitHub drops longer annotations
_MAX_SUMMARY = 512 * 1024  # bytes; GitHub refuses a summary above 1 MiB, and other steps write there too
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!@&$])")
_CODE = re.compile(r"(`[^`]+`)")  # a code span: what is in it stays as it is
_FENCE = re.compile(r"`{3,}")
_MAX_TEXT = 2000  # characters of one field


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
    text = markdown(report, shown).encode("utf-8", "replace")
    if path and len(text) <= _MAX_SUMMARY:
        with Path(path).open("ab") as file:
            file.write(text + b"\n")


def markdown(report: Report, shown: Iterable[Diagnosis]) -> str:
    """The outcome and every diagnosis, with its source frame and its cures."""
    parts = list(shown)
    lines = ["# torchmedic", "", _outcome(report.outcome, len(parts)), ""]
    for diagnosis in parts:
        lines += _section(diagnosis)
    return "\n".join(lines)


def _outcome(outcome: Outcome, count: int) -> str:
    found = "no finding" if not count else f"{count} finding{'s' if count != 1 else ''}"
    ended = "still running"
    if outcome.signal:
        ended = f"ended by {escaped(outcome.signal)}"
    elif outcome.exit_status is not None:
        ended = f"exit status {outcome.exit_status}"
    return f"{found}; {outcome.steps} steps, {ended}"


def _section(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"## {diagnosis.severity} {escaped(diagnosis.code)}: {escaped(diagnosis.message)}"
    yield ""
    yield f"**{diagnosis.grade}**: {escaped(diagnosis.cause)}"
    yield ""
    frame = terminal.plain_frames(diagnosis)
    if frame:
        yield from fenced(frame, "text")
        yield ""
    for fact in diagnosis.evidence:
        yield f"- {escaped(fact)}"
    if diagnosis.evidence:
        yield ""
    for treatment in diagnosis.treatments:
        yield from _treatment(treatment)
    yield f"`torchmedic explain {escaped(diagnosis.code)}` explains this code."
    yield ""


def _treatment(treatment: Treatment) -> Iterator[str]:
    yield f"**Help**: {escaped(treatment.title)} ({escaped(terminal.proof(treatment))})"
    yield ""
    if treatment.patch:
        yield from fenced(treatment.patch, "diff")
        yield ""


def escaped(text: str) -> str:
    """Text of the run as Markdown that shows exactly this text, on one line."""
    parts = _CODE.split(clipped(one_line(text), _MAX_TEXT))
    return "".join(part if _CODE.fullmatch(part) else _SPECIAL.sub(r"\\\1", part) for part in parts)


def fenced(text: str, language: str) -> Iterator[str]:
    """A code block whose fence is longer than any in the text."""
    text = visible(text).rstrip("\n")
    longest = max((len(found) for found in _FENCE.findall(text)), default=2)
    fence = "`" * (longest + 1)
    yield f"{fence}{language}"
    yield text
    yield fence
