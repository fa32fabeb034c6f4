"""One diagnosis as the page shows it: marked source lines, cures, and what the code means."""

from __future__ import annotations

from functools import cache

import msgspec

from torchmedic.diagnose import catalogue
from torchmedic.records import Diagnosis, Location, Treatment
from torchmedic.records.numbers import NumberTrace, PathNode, TriedCure
from torchmedic.records.plain_text import clipped
from torchmedic.report.frames import Change, Frame, frames, hunks, primary_place
from torchmedic.report.terminal import proof

_MAX_PATH = 16
_MAX_TRIED = 12

_KINDS = {
    "safe": "does not change the training",
    "changes-training": "changes the training",
    "edit": "edit of the source",
}


class CodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """A marked source line, cut into the text before the mark, the mark, and the text after it."""

    number: int
    before: str
    marked: str
    after: str
    label: str
    is_cause: bool
    column: int
    gap: bool = False


class CodeFrame(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    lines: tuple[CodeLine, ...]


class Cure(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    kind: str
    proven: bool
    proof: str
    result: str
    tried_on: str
    files: str  # that the patch changes
    changes: tuple[Change, ...]
    number: int


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One diagnosis. `meaning` are the paragraphs of `torchmedic explain`, `call` the failing operation as source."""

    diagnosis: Diagnosis
    number: int
    frames: tuple[CodeFrame, ...]
    cures: tuple[Cure, ...]
    meaning: tuple[str, ...] = ()
    call: str = ""
    path: tuple[PathNode, ...] = ()  # of a bad number through the operations
    tried: tuple[TriedCure, ...] = ()  # without success

    @property
    def place(self) -> Location | None:
        return primary_place(self.diagnosis)


def finding(number: int, diagnosis: Diagnosis, call: str = "", trace: NumberTrace | None = None) -> Finding:
    """A diagnosis, prepared. `number` is its place in the report."""
    entry = _entry(diagnosis.code, diagnosis.name)
    return Finding(
        diagnosis=diagnosis,
        number=number,
        frames=tuple(_code_frame(frame) for frame in frames(diagnosis)),
        cures=tuple(_cure(place, treatment) for place, treatment in enumerate(diagnosis.treatments)),
        meaning=catalogue.paragraphs(entry.doc) if entry is not None else (),
        call=call,
        path=trace.path[:_MAX_PATH] if trace is not None else (),
        tried=tuple(map(_shortened, trace.tried[:_MAX_TRIED])) if trace is not None else (),
    )


def _shortened(tried: TriedCure) -> TriedCure:
    """A cure with its new source line in the place of its patch."""
    added = [change.text.strip() for hunk in hunks(tried.patch) for change in hunk.added]
    return TriedCure(
        title=clipped(tried.title, 300), result=clipped(tried.result, 300), patch=clipped(" ".join(added), 200)
    )


_entry = cache(catalogue.find)  # the page is written again whenever something is found


def _code_frame(frame: Frame) -> CodeFrame:
    lines: list[CodeLine] = []
    outer = min(place.indent for place in frame.places)
    for place in frame.places:
        gap = bool(lines) and place.line > lines[-1].number + 1
        lines.append(_code_line(place, gap, place.indent - outer))
    head = frame.head
    return CodeFrame(title=f"{head.file}:{head.line}:{head.column}", lines=tuple(lines))


def _code_line(place: Location, gap: bool, depth: int) -> CodeLine:
    indent = " " * min(depth, 16)  # deep nesting is shown less deep
    start = max(0, place.column - 1 - place.indent)
    length = max(0, place.end_column - place.column)
    return CodeLine(
        number=place.line,
        before=indent + place.code[:start],
        marked=place.code[start : start + length],
        after=place.code[start + length :],
        label=place.label,
        is_cause=place.role == "cause",
        column=min(len(indent) + start, 60),
        gap=gap,
    )


def _cure(number: int, treatment: Treatment) -> Cure:
    return Cure(
        title=treatment.title,
        kind=_KINDS[treatment.safety],
        proven=treatment.proven,
        proof=proof(treatment),
        result=treatment.result,
        tried_on=treatment.tried_on,
        files=", ".join(dict.fromkeys(hunk.file for hunk in hunks(treatment.patch))),
        changes=_dedented([change for hunk in hunks(treatment.patch) for change in (*hunk.removed, *hunk.added)]),
        number=number,
    )


def _dedented(changes: list[Change]) -> tuple[Change, ...]:
    """The lines without their common indentation. The copied patch keeps it."""
    outer = min((len(each.text) - len(each.text.lstrip(" ")) for each in changes if each.text.strip()), default=0)
    return tuple(Change(each.sign, each.number, each.text[outer:]) for each in changes)
