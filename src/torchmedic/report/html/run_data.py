"""Reads everything from a run folder that the page shows. Damaged and missing files are skipped."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.records import BoxContents, Report
from torchmedic.records.gpu import GpuHealth
from torchmedic.records.memory import HeldMemory
from torchmedic.records.numbers import NumberTrace
from torchmedic.records.stall import Stall
from torchmedic.report import failing_call
from torchmedic.runfolder import black_box, events, files, layout, reading
from torchmedic.runfolder.confidential import is_confidential
from torchmedic.runfolder.gpu import read_gpu_health
from torchmedic.runfolder.stall import read_stalls

_MAX_PROCESSES = 64
_MAX_EVENT_BYTES = 4 << 20  # bytes of one process; the last ones are read
_MAX_ALL_EVENT_BYTES = 32 << 20


class MemoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of kind `memory` in events.jsonl, in bytes."""

    time: float
    rss: int
    step: int = 0
    allocated: int | None = None
    reserved: int | None = None


class AutopsyLine(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one source line keeps for backward."""

    nbytes: int = msgspec.field(name="bytes")
    file: str = ""
    line: int = 0


class Autopsy(msgspec.Struct, frozen=True, kw_only=True):
    """A line of kind `memory-autopsy`: what was in memory when it ran out, by heading; all together are `total`."""

    time: float
    where: str = ""
    asked: int | None = None
    total: int = 0
    step: int | None = None
    rows: dict[str, int] = {}
    lines: tuple[AutopsyLine, ...] = ()


class Holders(msgspec.Struct, frozen=True, kw_only=True):
    """A line of kind `holders`: the containers of the script that held most memory at that moment."""

    time: float
    step: int = 0
    holders: tuple[HeldMemory, ...] = ()


class CurveLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of kind `curves`: points of step, loss, learning rate, gradient norm and number of the place."""

    time: float
    places: tuple[str, ...] = ()
    points: tuple[tuple[float | None, ...], ...] = ()


class TorchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A line of kind `settings`: what was set in the process when something was found."""

    time: float
    values: dict[str, str] = {}


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Any other line of events.jsonl."""

    kind: str
    time: float
    step: int | None = None
    text: str = ""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One watched process of the run."""

    name: str
    rank: int = 0
    pid: int | None = None
    python: str = ""
    torch: str = ""
    cuda: str = ""
    box: BoxContents | None = None
    memory: tuple[MemoryLine, ...] = ()
    autopsies: tuple[Autopsy, ...] = ()
    holders: tuple[Holders, ...] = ()
    curves: tuple[CurveLine, ...] = ()
    traces: tuple[NumberTrace, ...] = ()
    settings: tuple[TorchSettings, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def started(self) -> float | None:
        times = [event.time for event in self.events if event.kind == "start"]
        return times[0] if times else self.box.started if self.box is not None else None


class RunData(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a run. `calls` is the source text of the failing operations, by the number of the diagnosis."""

    name: str
    report: Report
    confidential: bool = False
    processes: tuple[Process, ...] = ()
    gpu: GpuHealth | None = None
    stalls: tuple[Stall, ...] = ()
    calls: dict[int, str] = {}
    settings: dict[str, str] = {}  # of torchmedic, those that are not the default


def read(run: Path) -> RunData:
    """Read a run folder, or a `report.json` alone. Raises UnreadableRun if there is no report, or it is damaged."""
    report = files.read_report(run)
    folder = run if run.is_dir() else run.parent
    hidden = is_confidential(folder)
    calls = {}
    for number, diagnosis in enumerate(report.diagnoses):
        recipe = failing_call.find(folder, diagnosis)
        if recipe is not None:
            calls[number] = failing_call.text(recipe)
    return RunData(
        name=folder.resolve().name,
        report=report,
        confidential=hidden,
        processes=_processes(folder),
        gpu=read_gpu_health(folder),
        stalls=() if hidden else tuple(read_stalls(folder)),
        calls=calls,
        settings={} if hidden else files.read_settings(folder),
    )


def _processes(run: Path) -> tuple[Process, ...]:
    folders = layout.process_folders(run)[:_MAX_PROCESSES]
    most = min(_MAX_EVENT_BYTES, _MAX_ALL_EVENT_BYTES // max(1, len(folders)))
    return tuple(_process(folder, most) for folder in folders)


def _process(folder: Path, most: int) -> Process:
    box = None
    with contextlib.suppress(UnreadableRun):
        box = black_box.read(folder / files.BLACK_BOX)
    types = {
        "memory": MemoryLine,
        "memory-autopsy": Autopsy,
        "holders": Holders,
        "curves": CurveLine,
        "number-trace": NumberTrace,
        "settings": TorchSettings,
    }
    found: dict[str, list[Any]] = {kind: [] for kind in (*types, "")}
    start: dict[str, Any] = {}
    for line in _lines(folder / events.EVENTS, most):
        with contextlib.suppress(msgspec.DecodeError):
            fields = reading.decode(line, dict[str, Any])
            kind = str(fields.get("kind"))
            if kind in types:
                found[kind].append(msgspec.convert(fields, types[kind]))
                continue
            start = fields if kind == "start" else start
            detail = next((str(fields[key]) for key in ("symptom", "code", "signal", "pid") if fields.get(key)), "")
            found[""].append(msgspec.convert({**fields, "text": detail}, Event))
    return Process(
        name=folder.name,
        rank=layout.rank_of(folder),
        pid=start.get("pid"),
        python=str(start.get("python") or ""),
        torch=str(start.get("torch") or ""),
        cuda=str(start.get("cuda") or ""),
        box=box,
        memory=tuple(found["memory"]),
        autopsies=tuple(found["memory-autopsy"]),
        holders=tuple(found["holders"]),
        curves=tuple(found["curves"]),
        traces=tuple(found["number-trace"]),
        settings=tuple(found["settings"]),
        events=tuple(found[""]),
    )


def _lines(path: Path, most: int) -> list[bytes]:
    try:
        return events.lines(reading.read(path, most, last=True))
    except OSError:
        return []
