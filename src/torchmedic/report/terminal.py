"""Prints a diagnosis to a terminal: in full, or as one concise line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchmedic.records import Diagnosis, Location, Treatment
from torchmedic.records.plain_text import one_line
from torchmedic.report.frames import Frame, frames, hunks, primary_place
from torchmedic.runfolder import files

_SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_GUTTER = "blue"
_MIN_WIDTH = 40
_MAX_OUTER_INDENT = 8  # columns before the outermost line of a frame
_MAX_INNER_INDENT = 12  # further columns before its inner lines
_WRAPPED_LABEL = 44  # columns that a label of several lines gets at least


def concise(diagnosis: Diagnosis) -> str:
    """The diagnosis in one line that is easy to search."""
    place = diagnosis.cause_location
    where = f"{place.file}:{place.line}:{place.column}: " if place is not None else ""
    return one_line(f"{where}{diagnosis.severity}[{diagnosis.code}] {diagnosis.message} ({diagnosis.grade})")


def plain_frames(diagnosis: Diagnosis, width: int = 100) -> str:
    """The marked source lines as they are printed, without colour."""
    return "\n".join(line.plain for line in _frames(diagnosis, _gutter(diagnosis), "", width))


def print_all(console: Console, diagnoses: Sequence[Diagnosis], form: str, run: Path | None) -> None:
    """Print diagnoses in the format `full` or `concise`; the full ones with a blank line between them."""
    for number, diagnosis in enumerate(diagnoses):
        if form == "concise":
            console.print(Text(concise(diagnosis)), soft_wrap=True)
            continue
        if number:
            console.print()
        _print_full(console, diagnosis, run)


def _print_full(console: Console, diagnosis: Diagnosis, run: Path | None) -> None:
    """Print the whole diagnosis: message, places, evidence, help."""
    width = max(console.width, _MIN_WIDTH)
    for line in _lines(diagnosis, width):
        console.print(line, soft_wrap=True)
    tail = Text("explain: ", "bold")
    tail.append(f"torchmedic explain {diagnosis.code}", "not bold")
    if run is not None:
        written = run / files.HTML if (run / files.HTML).exists() else run / files.REPORT
        report = f"report: {written}"
        tail.append("      " if len(tail) + 6 + len(report) <= width else "\n")
        tail.append("report: ", "bold").append(report.removeprefix("report: "), "not bold")
    console.print(tail, soft_wrap=True)


def _lines(diagnosis: Diagnosis, width: int) -> Iterator[Text]:
    style = _SEVERITY_STYLE[diagnosis.severity]
    head = f"{diagnosis.severity}[{diagnosis.code}]: "
    for number, part in enumerate(textwrap.wrap(head + diagnosis.message, width, subsequent_indent="  ") or [head]):
        if number == 0:
            yield Text(part[: len(head)], style).append(part[len(head) :], "bold")
        else:
            yield Text(part, "bold")
    gutter = _gutter(diagnosis)
    yield from _frames(diagnosis, gutter, style, width)
    yield from _notes(diagnosis, gutter, width)
    primary = primary_place(diagnosis)
    for treatment in diagnosis.treatments:
        yield from _help(treatment, width)
        yield from _patch(treatment.patch, gutter, primary.file if primary is not None else "")


def _in_gutter(text: str) -> Text:
    """Text left of a source line. What is appended to it has its own style."""
    return Text.assemble((text, _GUTTER))


def _gutter(diagnosis: Diagnosis) -> int:
    return max((len(str(place.line)) for place in diagnosis.locations), default=1)


def _frames(diagnosis: Diagnosis, gutter: int, style: str, width: int) -> Iterator[Text]:
    shown = frames(diagnosis)
    for frame in shown:
        yield from _snippets(frame, gutter, style, width)
    if shown:
        yield Text(" " * (gutter + 1) + " |", _GUTTER)


def _snippets(frame: Frame, gutter: int, style: str, width: int) -> Iterator[Text]:
    head, arrow = frame.head, "-->" if frame.primary else ":::"
    yield _in_gutter(" " * (gutter + 1) + arrow).append(f" {head.file}:{head.line}:{head.column}")
    yield Text(" " * (gutter + 1) + " |", _GUTTER)
    before: int | None = None
    outer = min((place.indent for place in frame.places if place.code), default=0)
    for place in frame.places:
        if before is not None and place.line > before + 1:
            yield Text("...", _GUTTER)
        before = place.line
        # Deep indentation is shortened, and the lines of a frame keep their order: an inner block stays inside.
        indent = min(outer, _MAX_OUTER_INDENT) + min(place.indent - outer, _MAX_INNER_INDENT)
        yield from _snippet(place, indent, gutter, style, width)


def _snippet(place: Location, margin_left: int, gutter: int, style: str, width: int) -> Iterator[Text]:
    """One source line and its underline, with the label beside the underline or, if it does not fit, below it."""
    margin = _in_gutter(" " * (gutter + 1) + " | ")
    if not place.code:
        if place.label:
            yield margin + Text(place.label)
        return
    room = max(width - gutter - 4, _MIN_WIDTH - 8)
    start = min(max(0, place.column - 1 - place.indent), len(place.code))
    length = min(max(1, place.end_column - place.column), len(place.code) + 1)
    code, start = _window(place.code.replace("\n", " "), start, length, room - margin_left)
    yield _in_gutter(f"{place.line:>{gutter + 1}} | ").append(" " * margin_left + code)
    length = max(1, min(length, len(code) - start))
    mark, colour = ("^", style) if place.role == "cause" else ("-", "bold blue")
    underline = " " * (margin_left + start) + mark * length
    if not place.label:
        yield margin + Text(underline, colour)
        return
    if len(underline) + 1 + len(place.label) <= room:
        yield margin + Text(f"{underline} {place.label}", colour)
        return
    yield margin + Text(underline, colour)
    inset = min(margin_left + start, max(0, room - len(place.label), room - _WRAPPED_LABEL))
    for part in textwrap.wrap(place.label, room - inset):
        yield margin + Text(" " * inset + part, colour)


def _window(code: str, start: int, length: int, room: int) -> tuple[str, int]:
    """Shorten a long line so that the marked part stays visible."""
    if len(code) <= room:
        return code, start
    if start + min(length, room // 2) <= room - 3:
        return code[: room - 3] + "...", start
    shift = start - room // 4
    piece = code[shift : shift + room - 6]
    tail = "..." if shift + room - 6 < len(code) else ""
    return "..." + piece + tail, start - shift + 3


def _notes(diagnosis: Diagnosis, gutter: int, width: int) -> Iterator[Text]:
    for title, text in [(diagnosis.grade, diagnosis.cause), *(("note", fact) for fact in diagnosis.evidence)]:
        lead = " " * (gutter + 1) + " = "
        body = f"{title}: {text}"
        room = max(20, width - len(lead))
        for number, part in enumerate(textwrap.wrap(body, room, subsequent_indent="  ", break_long_words=False)):
            if number == 0:
                head, _, rest = part.partition(":")
                yield _in_gutter(lead).append(f"{head}:", "bold").append(rest)
            else:
                yield Text(" " * len(lead) + part)


def _help(treatment: Treatment, width: int) -> Iterator[Text]:
    line = f"help: {treatment.title}  [{proof(treatment)}]"
    for number, part in enumerate(textwrap.wrap(line, width, subsequent_indent="      ", break_long_words=False)):
        if number == 0:
            yield Text.assemble(("help:", "bold green"), part.removeprefix("help:"))
        else:
            yield Text(part)


def proof(treatment: Treatment) -> str:
    """What is known of a cure, in a few words."""
    if treatment.proven:
        where = f"proven on {treatment.tried_on}"
        return f"{where}: {treatment.result}" if treatment.result else where
    return f"predicted, not run: {treatment.result}" if treatment.result else "not tried"


def _patch(patch: str, gutter: int, file: str) -> Iterator[Text]:
    """A unified diff as numbered lines, removed and added. The name of a file other than `file` is shown."""
    for hunk in hunks(patch):
        if hunk.file != file:
            file = hunk.file
            yield _in_gutter(" " * (gutter + 1) + ":::").append(f" {file}")
        for change in (*hunk.removed, *hunk.added):
            colour = "red" if change.sign == "-" else "green"
            line = _in_gutter(f"{change.number:>{gutter + 1}} ")
            yield line.append(f"{change.sign} {change.text}", colour)
