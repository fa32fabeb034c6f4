"""Loss, gradient norm and learning rate over the steps, from the recorded points of a process."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from torchmedic.records import Diagnosis
from torchmedic.report.html.holders import short_name
from torchmedic.report.html.run_data import CurveLine, Process
from torchmedic.report.html.series import MAX_POINTS, Curve, Line, Mark, thinned

_MIN_POINTS = 3
_MAX_LOSSES = 4  # lines that call backward
_MAX_MARKS = 3
_LOG_RATIO = 200.0  # ratio of the largest to the smallest value, from which on a curve is drawn on a logarithmic scale

_Points = dict[int, float]  # value by step


def training_curves(process: Process, found: Sequence[Diagnosis], known: Collection[str]) -> list[Curve]:
    """The curves that tell something; a learning rate that never changes is a fact and no curve."""
    marks = tuple(
        Mark(x=float(each.step), text=f"{each.code}, step {each.step}")
        for each in found
        if each.step is not None and each.severity != "note"
    )[:_MAX_MARKS]
    losses = _losses(process.curves, known)
    norms = {"gradient norm": _column(process.curves, 3)}
    rates = {"learning rate": _column(process.curves, 2)}
    made = [_curve("Loss", losses, marks), _curve("Gradient norm at the update", norms, marks)]
    if len(set(rates["learning rate"].values())) > 1:
        made.append(_curve("Learning rate", rates, marks))
    return [curve for curve in made if curve is not None]


def constant_rate(process: Process) -> float | None:
    """The learning rate of the first group, if it was the same in all recorded steps."""
    rates = set(_column(process.curves, 2).values())
    return rates.pop() if len(rates) == 1 else None


def _losses(lines: Sequence[CurveLine], known: Collection[str]) -> dict[str, _Points]:
    """The losses by the line that called backward."""
    by_place: dict[str, _Points] = {}
    for line in lines:
        for point in line.points:
            number = int(point[4]) if len(point) > 4 and point[4] is not None else -1
            place = line.places[number] if 0 <= number < len(line.places) else ""
            if point[1] is not None:
                by_place.setdefault(place, {})[int(point[0] or 0)] = point[1]
    largest = sorted(by_place.items(), key=lambda each: -len(each[1]))[:_MAX_LOSSES]
    if len(largest) == 1:
        return {"loss": largest[0][1]}
    return {f"loss, {_shown(place, known)}": points for place, points in largest}


def _shown(place: str, known: Collection[str]) -> str:
    file, _, line = place.rpartition(":")
    name = short_name(file, known)
    return f"{os.path.basename(name) if os.path.isabs(name) else name}:{line}"


def _column(lines: Sequence[CurveLine], number: int) -> _Points:
    return {
        int(point[0] or 0): value
        for line in lines
        for point in line.points
        if len(point) > number and (value := point[number]) is not None
    }


def _curve(title: str, named: dict[str, _Points], marks: tuple[Mark, ...]) -> Curve | None:
    """Curves on one axis, thinned so that the extremes of each are kept."""
    steps: set[int] = set()
    for points in named.values():
        ordered = sorted(points)
        kept = thinned([points[step] for step in ordered], MAX_POINTS // len(named))
        steps |= {ordered[number] for number in kept}
    if len(steps) < _MIN_POINTS:
        return None
    x = sorted(steps)
    values = [points[step] for points in named.values() for step in x if step in points]
    is_wide = min(values) > 0 and max(values) > _LOG_RATIO * min(values)
    return Curve(
        title=title + (" (logarithmic)" if is_wide else ""),
        x_name="step",
        x_unit="",
        unit="",
        scale="log" if is_wide else "fit",
        x=tuple(float(step) for step in x),
        lines=tuple(Line(name=name, values=tuple(points.get(step) for step in x)) for name, points in named.items()),
        marks=marks,
    )
