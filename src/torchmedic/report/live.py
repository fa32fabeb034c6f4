"""The view of `torchmedic watch`: phase, speed and memory of each process, the GPUs, and the last diagnosis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchmedic.records import Diagnosis, Outcome
from torchmedic.records.gpu import GpuState
from torchmedic.report.terminal import concise

State = Literal["waiting", "running", "ended", "gone"]
_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "cyan"}
_LONG_QUIET_SECONDS = 10.0  # without progress, shown in colour


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run. None where its black box has no value; `rate` is in steps per second.

    `calls` is how many collectives a rank has called, `last_call` and `place` are the last one and its line.
    """

    name: str
    state: Literal["running", "ended", "gone", "unreadable"]
    pid: int | None = None
    phase: str = ""
    step: int | None = None
    rate: float | None = None
    quiet: float | None = None
    rss: int | None = None
    device_memory: int | None = None
    calls: int = 0
    last_call: str = ""
    place: str = ""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. `seconds` is its duration so far, `damage` the reason why its report cannot be read."""

    run: str
    state: State
    seconds: float | None = None
    outcome: Outcome | None = None
    processes: tuple[Watched, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    found: int = 0
    last: Diagnosis | None = None
    damage: str = ""


def ending(view: View) -> str:
    """A line that says how the run ended."""
    outcome = view.outcome
    if outcome is None or outcome.exit_status is None:
        return "the run has ended without a report: its processes are gone"
    how = f"by {outcome.signal}" if outcome.signal else f"with status {outcome.exit_status}"
    return f"the run has ended {how} after {outcome.steps} step{'s' if outcome.steps != 1 else ''}"


def render(view: View) -> RenderableType:
    return Group(*_parts(view))


def _parts(view: View) -> Iterator[RenderableType]:
    head = Text(view.run, "bold", overflow="fold")
    head.append(f"  {view.state}", "not bold green" if view.state == "running" else "not bold")
    if view.seconds is not None:
        head.append(f", {_duration(view.seconds)}", "not bold")
    yield head
    if view.processes:
        yield _processes(view)
        if sum(1 for process in view.processes if process.calls) > 1:
            yield _collectives(view)
    elif view.state == "waiting":
        yield Text("no process has imported torch yet")
    for gpu in view.gpus:
        yield _gpu(gpu)
    if view.damage:
        yield Text(view.damage, "bold red")
    elif view.last is not None:
        before = f"last of {view.found} found: " if view.found > 1 else "found: "
        yield Text(before).append(concise(view.last), _STYLES[view.last.severity])
    elif view.state != "waiting":
        yield Text("found: nothing")


def _processes(view: View) -> Table:
    device = any(process.device_memory for process in view.processes)
    table = Table(box=None, padding=(0, 1 if device else 2, 0, 0), pad_edge=False, header_style="dim")
    shown = ["process", "pid", "phase", "step", "speed", "quiet for", "memory"]
    for name in (*shown, "device") if device else shown:
        table.add_column(name, justify="left" if name in ("process", "phase") else "right", no_wrap=True)
    for process in view.processes:
        quiet = Text(_pause(process.quiet))
        if process.state == "running" and (process.quiet or 0) > _LONG_QUIET_SECONDS:
            quiet.stylize("yellow")
        cells: list[str | Text] = [
            process.name,
            str(process.pid or ""),
            process.phase if process.state == "running" else process.state,
            "" if process.step is None else str(process.step),
            _speed(process.rate) if process.state == "running" else "",
            quiet,
            _size(process.rss),
        ]
        table.add_row(*cells, *([_size(process.device_memory)] if device else []))
    return table


def _collectives(view: View) -> Table:
    """How far each rank is: a rank that made fewer calls than the others is the one that they wait for."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("rank", "calls", "last call", "line"):
        table.add_column(name, justify="right" if name == "calls" else "left", overflow="ellipsis", no_wrap=True)
    for process in view.processes:
        if process.calls:
            table.add_row(process.name, str(process.calls), process.last_call, process.place)
    return table


def _gpu(gpu: GpuState) -> Text:
    line = Text(f"GPU {gpu.index} {gpu.name}")
    if gpu.temperature is not None:
        line.append(f"  {gpu.temperature} C")
    if gpu.power is not None:
        limit = f" of {gpu.power_limit:.0f}" if gpu.power_limit else ""
        line.append(f"  {gpu.power:.0f}{limit} W")
    if gpu.memory_used is not None and gpu.memory_total is not None:
        line.append(f"  {_size(gpu.memory_used)} of {_size(gpu.memory_total)}")
    slowed = [reason for reason in gpu.throttle if reason not in ("idle", "application clocks", "display clocks")]
    if slowed:
        line.append(f"  slowed: {', '.join(slowed)}", "yellow")
    bad = [gpu.lost] if gpu.lost else []
    bad += [f"Xid {xid.code}" for xid in gpu.xids[-3:]]
    bad += [f"{gpu.ecc_new} new memory errors"] if gpu.ecc_new else []
    if bad:
        line.append(f"  {', '.join(bad)}", "bold red")
    return line


def _size(count: int | None) -> str:
    """A size in at most four figures, so that columns keep their width."""
    if not count:
        return ""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            value = count / (1 << power)
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count >> 10} KiB"


def _speed(rate: float | None) -> str:
    if not rate:
        return ""
    return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s/step"


def _pause(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{max(seconds, 0):.1f} s" if seconds < 60 else _duration(seconds)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
