"""Geometry of the pictures: numbers in, numbers in the unit square of an SVG out. The templates write the tags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchmedic.records import Phase
from torchmedic.report.html.holders import Block, Waiter
from torchmedic.report.html.series import Curve, RankRow, RankStrip, ScaleKind, StepStrip

WIDTH, HEIGHT = 1000.0, 100.0  # of a drawing that is stretched to the width of the page
STACK: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer", "other")  # from the bottom up
BOX_WIDTH, BOX_HEIGHT, BOX_GAP, LANE = 300.0, 58.0, 26.0, 16.0  # of the boxes of waiting threads, in pixels
COLOURS = 8
_MAX_DECADES = 5  # that are labelled
_PADDING = 0.06  # above and below a curve that does not begin at zero


class Rect(msgspec.Struct, frozen=True, kw_only=True):
    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """A label of an axis, at a share of its length from 0 to 1."""

    at: float
    text: str


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A stretched drawing with labels beside it."""

    rects: tuple[Rect, ...] = ()
    paths: tuple[tuple[str, str, str], ...] = ()  # class, path, name
    marks: tuple[Tick, ...] = ()
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()


class Arrow(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    cycle: bool = False


class WaitGraph(msgspec.Struct, frozen=True, kw_only=True):
    """Boxes from top to bottom, and arrows from the thread that waits to the thread that holds."""

    width: float
    height: float
    boxes: tuple[tuple[float, Waiter], ...]
    arrows: tuple[Arrow, ...]


def size(count: float) -> str:
    """Bytes for people, with three figures."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            value = count / (1 << power)
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            value = seconds / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def curve_plot(curve: Curve) -> Plot:
    """The lines of a curve with its marks."""
    low, high = curve.x[0], max(curve.x[-1], *(mark.x for mark in curve.marks), curve.x[0] + 1e-9)
    scale = scale_of([value for line in curve.lines for value in line.values if value is not None], curve.scale)
    shown = size if curve.unit == "bytes" else _number
    return Plot(
        paths=tuple(
            (f"s-k{number % COLOURS}", _path(curve.x, line.values, low, high, scale), line.name)
            for number, line in enumerate(curve.lines)
        ),
        marks=tuple(Tick(at=_share(mark.x, low, high), text=mark.text) for mark in curve.marks),
        x_ticks=tuple(Tick(at=part, text=_along(curve, low + part * (high - low))) for part in (0.0, 0.5, 1.0)),
        y_ticks=tuple(Tick(at=round(scale.share(height), 4), text=shown(height)) for height in scale.ticks),
    )


def _along(curve: Curve, value: float) -> str:
    return duration(value) if curve.x_unit == "s" else f"{curve.x_name} {value:.0f}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _share(value: float, low: float, high: float) -> float:
    return round((value - low) / (high - low), 4) if high > low else 0.0


def _path(x: tuple[float, ...], values: tuple[float | None, ...], low: float, high: float, scale: Scale) -> str:
    parts: list[str] = []
    pen = "M"
    for when, value in zip(x, values, strict=True):
        if value is None or not math.isfinite(value):
            continue  # measured by another source of the curve
        parts.append(f"{pen}{_share(when, low, high) * WIDTH:.1f} {HEIGHT * (1 - scale.share(value)):.2f}")
        pen = "L"
    return "".join(parts)


def step_plot(strip: StepStrip, found: Sequence[tuple[int | None, str]] = ()) -> Plot:
    """One stacked bar per step or group of steps; `found` are steps with the code of what was found there."""
    rects = []
    width = WIDTH / len(strip.bars)
    for number, bar in enumerate(strip.bars):
        bottom = 0.0
        steps = f"step {bar.first}" if bar.first == bar.last else f"steps {bar.first} to {bar.last}, on average"
        for phase in STACK:
            seconds = bar.seconds.get(phase, 0.0)
            top = min(bottom + seconds, strip.ceiling)
            if top - bottom > 0.002 * strip.ceiling:
                rects.append(
                    Rect(
                        x=round(number * width, 2),
                        y=round(HEIGHT * (1 - top / strip.ceiling), 2),
                        width=round(width * 0.86, 2),
                        height=round(HEIGHT * (top - bottom) / strip.ceiling, 2),
                        colour=phase,
                        title=f"{steps}: {phase} {duration(seconds)}",
                    )
                )
            bottom = top
    first, last = strip.bars[0].first, strip.bars[-1].last
    marks = [
        Tick(at=round((number + 0.43) * width / WIDTH, 4), text=f"{code}, step {step}")
        for step, code in found
        for number, bar in enumerate(strip.bars)
        if step is not None and bar.first <= step <= bar.last
    ]
    return Plot(
        rects=tuple(rects),
        marks=tuple(marks[:3]),
        x_ticks=(Tick(at=0.0, text=f"step {first}"), Tick(at=1.0, text=f"step {last}")),
        y_ticks=tuple(Tick(at=part, text=duration(part * strip.ceiling)) for part in (0.5, 1.0)),
    )


def rank_plot(strip: RankStrip) -> list[tuple[str, Plot]]:
    """One drawing per process, all on the same time axis."""
    return [
        (
            row.name,
            Plot(
                paths=tuple((f"f-{phase}", _bands(row, phase), f"{row.name}: {phase}") for phase in STACK),
                marks=(Tick(at=round(row.quiet, 4), text=f"last sign of life: step {row.last_step}"),),
            ),
        )
        for row in strip.rows
    ]


def _bands(row: RankRow, phase: Phase) -> str:
    """All the time of one phase as one path, which is a fifth of the text of as many rectangles."""
    return "".join(
        f"M{WIDTH * left:.0f} 0h{WIDTH * (right - left):.0f}v{HEIGHT:.0f}h-{WIDTH * (right - left):.0f}z"
        for each, left, right in row.spans
        if each == phase
    )


def icicle(block: Block) -> Plot:
    """Rows from the whole at the top to its parts; widths are bytes."""
    rects = [Rect(x=0.0, y=0.0, width=WIDTH, height=30.0, colour="whole", title=f"{block.name}: {size(block.nbytes)}")]
    x = 0.0
    for number, part in enumerate(block.parts):
        width = WIDTH * part.nbytes / block.nbytes
        colour = f"k{number % COLOURS}"
        rects.append(_part(x, 32.0, width, 34.0, colour, part))
        inner = x
        for leaf in part.parts:
            leaf_width = WIDTH * leaf.nbytes / block.nbytes
            rects.append(_part(inner, 68.0, leaf_width, 32.0, colour, leaf))
            inner += leaf_width
        x += width
    return Plot(rects=tuple(rects))


def _part(x: float, y: float, width: float, height: float, colour: str, block: Block) -> Rect:
    return Rect(
        x=round(x, 2),
        y=y,
        width=round(width, 2),
        height=height,
        colour=colour,
        title=f"{block.name}: {size(block.nbytes)}",
    )


def wait_graph(waiters: tuple[Waiter, ...]) -> WaitGraph | None:
    """Boxes and arrows of the waiting threads; None if no thread waits for another one of them."""
    edges = [(number, each.target) for number, each in enumerate(waiters) if each.target is not None]
    if not edges:
        return None
    tops = [number * (BOX_HEIGHT + BOX_GAP) + 1 for number in range(len(waiters))]
    arrows = []
    for lane, (source, target) in enumerate(edges):
        out = BOX_WIDTH + LANE * (1 + lane)
        # An arrow leaves below the middle of its box and arrives above the middle of the other.
        start, end = tops[source] + BOX_HEIGHT * 0.68, tops[target] + BOX_HEIGHT * 0.32
        path = f"M{BOX_WIDTH} {start:.1f}H{out:.1f}V{end:.1f}H{BOX_WIDTH + 5}"
        arrows.append(Arrow(path=path, cycle=_in_cycle(source, dict(edges))))
    return WaitGraph(
        width=BOX_WIDTH + LANE * (len(edges) + 1),
        height=tops[-1] + BOX_HEIGHT + 1,
        boxes=tuple(zip(tops, waiters, strict=True)),
        arrows=tuple(arrows),
    )


def _in_cycle(source: int, edges: dict[int, int]) -> bool:
    seen, at = set[int](), edges.get(source)
    while at is not None and at not in seen:
        if at == source:
            return True
        seen.add(at)
        at = edges.get(at)
    return False


class Scale(NamedTuple):
    """Values from `low` to `high`; `ticks` are labelled."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """The height of a value, from 0 to 1."""
        if self.is_log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def scale_of(values: Sequence[float], kind: ScaleKind) -> Scale:
    """A scale on which all values lie. A logarithmic one needs values above zero."""
    if kind == "zero":
        return _from_zero(max(values, default=1.0))
    low, high = min(values, default=0.0), max(values, default=1.0)
    if kind == "log":
        first = math.floor(math.log10(low))
        last = max(math.ceil(math.log10(high)), first + 1)
        powers = range(first, last + 1, -(-(last - first) // _MAX_DECADES))
        return Scale(10.0**first, 10.0**last, True, tuple(10.0**power for power in powers))
    pad = _PADDING * (high - low) or 0.5 * abs(high) or 1.0
    low, high = low - pad, high + pad
    step = _decimal_step((high - low) / 4)
    ticks = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Scale(low, high, False, tuple(ticks))


def _from_zero(most: float) -> Scale:
    """Three to five labels from zero to above `most`, at a power of two from each other, which suits bytes."""
    step = 2.0 ** math.ceil(math.log2(most / 4)) if most > 0 else 1.0
    ticks = [number * step for number in range(math.ceil(most / step) + 1)]
    return Scale(0.0, ticks[-1], False, tuple(ticks))


def _decimal_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
