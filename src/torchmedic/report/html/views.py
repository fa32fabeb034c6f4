"""Everything that the page shows, prepared: the templates only write it down."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cache

import msgspec

from torchmedic import __version__
from torchmedic.diagnose import catalogue
from torchmedic.records import Diagnosis, Location, Outcome, Report, Treatment
from torchmedic.records.memory import HeldMemory
from torchmedic.report.frames import Frame, frames
from torchmedic.report.html import charts, holders, series
from torchmedic.report.html.run_data import Process, RunData
from torchmedic.report.markdown import proof
from torchmedic.report.patches import Change, hunks

_MAX_EVENTS = 60
_MAX_HOLDERS = 12
_KINDS = {
    "safe": "does not change the training",
    "changes-training": "changes the training",
    "edit": "edit of the source",
}
_EVENTS = {
    "start": "process started",
    "exception": "exception",
    "nonfinite": "value that is not finite",
    "silent": "silent mistake noticed",
    "fault": "fault of torchmedic, contained",
    "echo": "consequence of another failure",
    "death": "process died",
    "lost-rank": "connection to another rank lost",
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

    @property
    def place(self) -> Location | None:
        return self.diagnosis.cause_location or next(iter(self.diagnosis.locations), None)


class MemoryPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The split of memory when it ran out."""

    process: str
    block: holders.Block
    plot: charts.Plot
    asked: int | None
    step: int | None


class WaitPicture(msgspec.Struct, frozen=True, kw_only=True):
    waiters: tuple[holders.Waiter, ...]
    graph: charts.WaitGraph | None
    still: float
    step: int
    phase: str


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page."""

    name: str
    version: str
    outcome: Outcome
    ending: str
    started: str
    confidential: bool
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    left_out: int
    curves: tuple[tuple[str, series.Curve, charts.Plot], ...]
    strips: tuple[tuple[str, series.StepStrip, charts.Plot], ...]
    splits: tuple[MemoryPicture, ...]
    held: tuple[HeldMemory, ...]
    ranks: tuple[series.RankStrip, list[tuple[str, charts.Plot]]] | None
    pictured: int
    waits: tuple[WaitPicture, ...]
    facts: tuple[tuple[str, str], ...]
    events: tuple[tuple[str, str, str, str, str], ...]

    @property
    def has_pictures(self) -> bool:
        return bool(self.curves or self.strips or self.splits or self.held or self.ranks or self.waits)


def build(data: RunData, report: Report, left_out: int, pictured: int) -> Page:
    """The page of a run.

    Args:
        data: Everything that is known.
        report: The part of the run's report that is shown.
        left_out: How many diagnoses are not part of it.
        pictured: Of how many processes memory and steps are drawn.
    """
    findings = [_finding(number, each, data) for number, each in enumerate(report.diagnoses)]
    several = len(data.processes) > 1
    curves, strips = [], []
    for process in data.processes[:pictured]:
        title = f" of {process.name}" if several else ""
        if (curve := series.memory_curve(process)) is not None:
            curves.append((title, curve, charts.curve_plot(curve)))
        if (strip := series.step_strip(process.box, series.MAX_BARS // (1 + several))) is not None:
            found = [(each.step, each.code) for each in report.diagnoses if each.rank == process.rank]
            strips.append((title, strip, charts.step_plot(strip, found)))
    ranks = series.rank_strip(data.processes)
    return Page(
        name=data.name,
        version=__version__,
        outcome=report.outcome,
        ending=_ending(report.outcome),
        started=_started(data.processes),
        confidential=data.confidential,
        findings=tuple(each for each in findings if each.diagnosis.severity != "note"),
        notes=tuple(each for each in findings if each.diagnosis.severity == "note"),
        left_out=left_out,
        curves=tuple(curves),
        strips=tuple(strips),
        splits=tuple(itertools.islice(_splits(data), pictured)),
        held=_held(data),
        ranks=(ranks, charts.rank_plot(ranks)) if ranks is not None else None,
        pictured=min(pictured, len(data.processes)),
        waits=tuple(itertools.islice(_waits(data), pictured)),
        facts=tuple(_facts(data)),
        events=tuple(_events(data.processes)),
    )


def _finding(number: int, diagnosis: Diagnosis, data: RunData) -> Finding:
    entry = _entries().get(diagnosis.code)
    return Finding(
        diagnosis=diagnosis,
        number=number,
        frames=tuple(_code_frame(frame) for frame in frames(diagnosis)),
        cures=tuple(_cure(place, treatment) for place, treatment in enumerate(diagnosis.treatments)),
        meaning=_paragraphs(entry.doc) if entry is not None else (),
        call=data.calls.get(number, ""),
    )


def _paragraphs(doc: str) -> tuple[str, ...]:
    """Text whose lines may be broken anew; lists and code keep their lines."""
    parts = doc.split("\n\n")
    return tuple(part if re.search(r"^(\s|[-*] )", part, re.MULTILINE) else " ".join(part.split()) for part in parts)


@cache
def _entries() -> dict[str, catalogue.Entry]:
    return {entry.code: entry for entry in catalogue.entries()}  # the source of every rule is read for this


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
        changes=_dedented([change for hunk in hunks(treatment.patch) for change in (*hunk.removed, *hunk.added)]),
        number=number,
    )


def _dedented(changes: list[Change]) -> tuple[Change, ...]:
    """The same lines without the indentation that all of them share. What is copied keeps it."""
    outer = min((len(each.text) - len(each.text.lstrip(" ")) for each in changes if each.text.strip()), default=0)
    return tuple(Change(each.sign, each.number, each.text[outer:]) for each in changes)


def _ending(outcome: Outcome) -> str:
    if outcome.signal:
        return f"ended by {outcome.signal}"
    return "still running" if outcome.exit_status is None else f"exit status {outcome.exit_status}"


def _started(processes: Sequence[Process]) -> str:
    times = [process.started for process in processes if process.started is not None]
    if not times:
        return ""
    return f"{datetime.datetime.fromtimestamp(min(times), datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _known(data: RunData) -> set[str]:
    return {place.file for diagnosis in data.report.diagnoses for place in diagnosis.locations}


def _splits(data: RunData) -> Iterator[MemoryPicture]:
    for process in data.processes:
        for autopsy in process.autopsies[-1:]:
            block = holders.memory_split(autopsy, _known(data), lines=not data.confidential)
            if block is not None:
                yield MemoryPicture(
                    process=process.name,
                    block=block,
                    plot=charts.icicle(block),
                    asked=autopsy.asked,
                    step=autopsy.step,
                )


def _held(data: RunData) -> tuple[HeldMemory, ...]:
    if data.confidential:
        return ()
    found = [line for process in data.processes for line in process.holders]
    last = max(found, key=lambda line: line.time, default=None)
    return () if last is None else tuple(sorted(last.holders, key=lambda held: -held.nbytes)[:_MAX_HOLDERS])


def _waits(data: RunData) -> Iterator[WaitPicture]:
    for stall in data.stalls:
        found = holders.waiters(stall, _known(data))
        if found:
            yield WaitPicture(
                waiters=found,
                graph=charts.wait_graph(found),
                still=stall.still,
                step=stall.step,
                phase=stall.phase,
            )


def _facts(data: RunData) -> Iterator[tuple[str, str]]:
    outcome = data.report.outcome
    yield "run", data.name
    yield "ending", _ending(outcome)
    yield "weight updates", str(outcome.steps)
    if outcome.symptom:
        yield "symptom", outcome.symptom
    for name in ("python", "torch", "cuda"):
        found = sorted({getattr(process, name) for process in data.processes} - {""})
        if found:
            yield {"python": "Python", "torch": "PyTorch", "cuda": "CUDA of PyTorch"}[name], ", ".join(found)
    yield "torchmedic", __version__
    if data.gpu is not None:
        yield "GPU driver", data.gpu.driver
        for gpu in data.gpu.gpus[:16]:
            yield f"GPU {gpu.index}", gpu.name + (f", {charts.size(gpu.memory_total)}" if gpu.memory_total else "")
    for process in data.processes[:16]:
        yield process.name, f"process {process.pid}" if process.pid else "no start recorded"
    if data.confidential:
        yield "confidential", "yes: no source and no values were kept"


def _events(processes: Sequence[Process]) -> list[tuple[str, str, str, str, str]]:
    """Time since the start of the run, process, step, what, and a detail."""
    found = sorted(
        ((event, process.name) for process in processes for event in process.events), key=lambda each: each[0].time
    )
    start = found[0][0].time if found else 0.0
    return [
        (
            f"+{event.time - start:.1f} s",
            name,
            "" if event.step is None else str(event.step),
            _EVENTS.get(event.kind, event.kind),
            event.text if event.kind != "start" else f"process {event.text}",
        )
        for event, name in found[:_MAX_EVENTS]
    ]
