"""Everything that the page shows, prepared: the templates only write it down."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Sequence

import msgspec

from torchmedic import __version__
from torchmedic.records import Diagnosis, Outcome, Phase, Report
from torchmedic.records.memory import HeldMemory
from torchmedic.records.numbers import NumberTrace
from torchmedic.report.html import charts, holders, series
from torchmedic.report.html.findings import Finding, finding
from torchmedic.report.html.run_data import Process, RunData
from torchmedic.report.html.training_curves import constant_rate, training_curves

_MAX_EVENTS = 60
_MAX_HOLDERS = 12
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
    phase: Phase


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
    found = [
        finding(number, each, data.calls.get(number, ""), _trace(each, data))
        for number, each in enumerate(report.diagnoses)
    ]
    several = len(data.processes) > 1
    curves, strips = [], []
    for process in data.processes[:pictured]:
        title = f" of {process.name}" if several else ""
        of_rank = [each for each in report.diagnoses if each.rank == process.rank]
        drawn = training_curves(process, of_rank, _known(data)) if not data.confidential else []
        if (memory := series.memory_curve(process)) is not None:
            drawn.append(memory)
        curves += [(title, curve, charts.curve_plot(curve)) for curve in drawn]
        if (strip := series.step_strip(process.box, series.MAX_BARS // (1 + several))) is not None:
            steps = [(each.step, each.code) for each in of_rank]
            strips.append((title, strip, charts.step_plot(strip, steps)))
    ranks = series.rank_strip(data.processes)
    return Page(
        name=data.name,
        version=__version__,
        outcome=report.outcome,
        ending=_ending(report.outcome),
        started=_started(data.processes),
        confidential=data.confidential,
        findings=tuple(each for each in found if each.diagnosis.severity != "note"),
        notes=tuple(each for each in found if each.diagnosis.severity == "note"),
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


def _trace(diagnosis: Diagnosis, data: RunData) -> NumberTrace | None:
    """The way of the bad number that a diagnosis is about."""
    for process in data.processes:
        for trace in process.traces:
            same = (trace.code, trace.step, process.rank) == (diagnosis.code, diagnosis.step, diagnosis.rank)
            if same and not data.confidential:
                return trace
    return None


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
                    process=process.name, block=block, plot=charts.icicle(block), asked=autopsy.asked, step=autopsy.step
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
                waiters=found, graph=charts.wait_graph(found), still=stall.still, step=stall.step, phase=stall.phase
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
    if data.settings:
        yield "settings of torchmedic", ", ".join(f"{name} = {value}" for name, value in data.settings.items())
    for process in data.processes[:1] if not data.confidential else ():
        for line in process.settings[-1:]:
            yield from itertools.islice(line.values.items(), 24)
        if not process.settings and (rate := constant_rate(process)) is not None:
            yield "learning rate", f"{rate:.4g}"
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
