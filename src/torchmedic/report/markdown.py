"""A report in Markdown: for a pull request, an issue, or the summary of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torchmedic.records import Diagnosis, Outcome, Report, Treatment
from torchmedic.records.plain_text import clipped, one_line, visible
from torchmedic.report import terminal

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!@&$])")
_CODE = re.compile(r"(`[^`]+`)")  # a code span: what is in it stays as it is
_FENCE = re.compile(r"`{3,}")
_MAX_TEXT = 2000  # characters of one field


def document(report: Report, shown: Iterable[Diagnosis]) -> str:
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
