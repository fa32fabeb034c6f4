"""Curves and strips from the recorded data of a process: pure functions whose results are bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from torchmedic.records import BoxContents, Phase
from torchmedic.report.html.run_data import Process

MAX_POINTS = 600
MAX_BARS = 120
_STRIP_BINS = 240
_MAX_SPANS = 4800  # spans of all processes
_SPIKE = 4.0  # a step that takes so many times as long as the 90th percentile is cut off in the picture
_MIN_SECONDS, _MIN_CHANGE = 1.0, 0.1  # a curve that is shorter and changes less tells nothing
ScaleKind = Literal["zero", "fit", "log"]  # from zero up, from the smallest value up, logarithmic
_MARKED = ("exception", "nonfinite", "silent", "death", "lost-rank")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One curve; None at points without a measurement."""

    name: str
    values: tuple[float | None, ...]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A moment that is marked in a curve."""

    x: float
    text: str


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Curves over one axis. Points are `x` with the values of every line."""

    title: str
    x_name: str
    unit: str
    x: tuple[float, ...]
    lines: tuple[Line, ...]
    x_unit: str = "s"
    scale: ScaleKind = "zero"
    marks: tuple[Mark, ...] = ()


class StepBar(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by phase, of one step or on average of several consecutive ones."""

    first: int
    last: int
    seconds: dict[Phase, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class StepStrip(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that the black box still holds.

    `usual` is the median time of a step and `ceiling` the height of the picture, in seconds. `cut` bars are higher.
    `open_phase` is the phase that step `open_step` was in when the process ended, None if the process ended cleanly.
    """

    bars: tuple[StepBar, ...]
    usual: float
    ceiling: float
    cut: int = 0
    open_phase: Phase | None = None
    open_step: int = 0

    @property
    def shares(self) -> dict[Phase, float]:
        """Share of all time by phase, from 0 to 1."""
        totals = {
            phase: sum(bar.seconds.get(phase, 0.0) * (bar.last - bar.first + 1) for bar in self.bars)
            for phase in get_args(Phase)
        }
        whole = sum(totals.values()) or 1.0
        return {phase: seconds / whole for phase, seconds in totals.items()}


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process over time: phases with their share of the width, from 0 to 1. `quiet` is the last sign of life."""

    name: str
    spans: tuple[tuple[Phase, float, float], ...]
    last_step: int
    last_phase: Phase
    quiet: float


class RankStrip(msgspec.Struct, frozen=True, kw_only=True):
    """All processes. `first_quiet` is the one that stopped first, well before the last, without a clean exit."""

    seconds: float
    rows: tuple[RankRow, ...]
    first_quiet: RankRow | None = None


def memory_curve(process: Process) -> Curve | None:
    """Memory of one process over time, from its events and from its black box; None if that tells nothing."""
    start = process.started
    if start is None:
        return None
    moments = process.box.moments if process.box is not None else ()
    points: dict[float, tuple[float | None, ...]] = {
        moment.time: (moment.rss or None, moment.device_memory or None, None) for moment in moments
    }
    points |= {line.time: (line.rss, line.allocated, line.reserved) for line in process.memory}
    ordered = [(when - start, values) for when, values in sorted(points.items()) if any(values) and when >= start]
    if len(ordered) < 3:
        return None
    sizes = [value for _, values in ordered for value in values[:1] if value]
    is_short = ordered[-1][0] - ordered[0][0] < _MIN_SECONDS
    if is_short and max(sizes, default=0) <= (1 + _MIN_CHANGE) * min(sizes, default=0):
        return None
    kept = [ordered[number] for number in thinned([values[0] or values[1] or 0 for _, values in ordered], MAX_POINTS)]
    names = ("resident memory of the process", "allocated on the device", "reserved on the device")
    lines = tuple(
        Line(name=name, values=tuple(values[number] for _, values in kept))
        for number, name in enumerate(names)
        if any(values[number] for _, values in kept)
    )
    return Curve(
        title="Memory over time",
        x_name="seconds since the start",
        unit="bytes",
        x=tuple(round(when, 3) for when, _ in kept),
        lines=lines,
        marks=_marks(process, start),
    )


def _marks(process: Process, start: float) -> tuple[Mark, ...]:
    found = [event for event in process.events if event.kind in _MARKED]
    return tuple(
        Mark(
            x=round(event.time - start, 3),
            text=(event.text or event.kind) + (f", step {event.step}" if event.step is not None else ""),
        )
        for event in found[:5]
    )


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Indices of at most `most` points that keep the first, the last, and the extremes of every stretch."""
    if len(values) <= most:
        return list(range(len(values)))
    stretches = (most - 2) // 2
    inner = range(1, len(values) - 1)
    kept = {0, len(values) - 1}
    for number in range(stretches):
        part = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        kept |= {min(part, key=lambda index: values[index]), max(part, key=lambda index: values[index])}
    return sorted(kept)


def step_strip(box: BoxContents | None, most: int = MAX_BARS) -> StepStrip | None:
    """Time by phase of the last steps; None below two whole steps.

    A moment of the black box says that a phase begins; it ends with the next moment. The oldest step may have lost its
    beginning, and the newest has not ended, so neither is shown.
    """
    if box is None or len(box.moments) < 4:
        return None
    steps: dict[int, dict[Phase, float]] = {}
    for moment, after in zip(box.moments, box.moments[1:], strict=False):
        of_step = steps.setdefault(moment.step, {})
        of_step[moment.phase] = of_step.get(moment.phase, 0.0) + max(0.0, after.time - moment.time)
    last = box.moments[-1]
    steps.pop(last.step, None)
    if box.moments[0].step:
        steps.pop(box.moments[0].step, None)
    if len(steps) < 2:
        return None
    single = [StepBar(first=step, last=step, seconds=seconds) for step, seconds in sorted(steps.items())]
    bars = _grouped(single, most)
    heights = sorted(bar.total for bar in bars)
    high = heights[int(0.9 * (len(heights) - 1))]
    ceiling = heights[-1] if heights[-1] <= _SPIKE * high or not high else 1.5 * high
    return StepStrip(
        bars=tuple(bars),
        usual=sorted(bar.total for bar in single)[len(single) // 2],
        ceiling=ceiling or 1e-9,
        cut=sum(bar.total > ceiling for bar in bars),
        open_phase=None if box.clean_exit else last.phase,
        open_step=last.step,
    )


def _grouped(bars: list[StepBar], most: int) -> list[StepBar]:
    size = -(-len(bars) // most)
    if size == 1:
        return bars
    groups = [bars[start : start + size] for start in range(0, len(bars), size)]
    return [
        StepBar(
            first=group[0].first,
            last=group[-1].last,
            seconds={
                phase: sum(bar.seconds.get(phase, 0.0) for bar in group) / len(group)
                for phase in get_args(Phase)
                if any(phase in bar.seconds for bar in group)
            },
        )
        for group in groups
    ]


def rank_strip(processes: Sequence[Process]) -> RankStrip | None:
    """The phases of every process on one time axis; None for a single process."""
    boxes = [(process.name, process.box) for process in processes if process.box is not None and process.box.moments]
    if len(boxes) < 2:
        return None
    begin = max(box.moments[0].time for _, box in boxes)
    end = max(box.moments[-1].time for _, box in boxes)
    if end <= begin:
        return None
    bins = min(_STRIP_BINS, _MAX_SPANS // len(boxes))
    rows = [
        RankRow(
            name=name,
            spans=_spans(box, begin, end, bins),
            last_step=box.moments[-1].step,
            last_phase=box.moments[-1].phase,
            quiet=max(0.0, (box.moments[-1].time - begin) / (end - begin)),
        )
        for name, box in boxes
    ]
    cut_off = [row for row, (_, box) in zip(rows, boxes, strict=True) if not box.clean_exit and row.quiet < 0.98]
    first = min(cut_off, key=lambda row: row.quiet, default=None)
    return RankStrip(seconds=end - begin, rows=tuple(rows), first_quiet=first)


def _spans(box: BoxContents, begin: float, end: float, bins: int) -> tuple[tuple[Phase, float, float], ...]:
    """The phase at the middle of each bin, with equal neighbours joined."""
    spans: list[tuple[Phase, float, float]] = []
    at = 0
    for number in range(bins):
        when = begin + (number + 0.5) / bins * (end - begin)
        if when > box.moments[-1].time:
            break
        while at + 1 < len(box.moments) and box.moments[at + 1].time <= when:
            at += 1
        phase, right = box.moments[at].phase, (number + 1) / bins
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], right)
        else:
            spans.append((phase, number / bins, right))
    return tuple(spans)
