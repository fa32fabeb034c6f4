"""Points of holders over many looks -> the holders that only ever grow, and how fast.

Growth is steady if there is more at nearly every look and it does not slow down. What fills up and stays, what is
emptied now and then, and what is bounded by itself is not.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from torchmedic.detect.loop.growing_graph import carried_since
from torchmedic.observe.heap.growth_watch import Key, LeakWatch, Look, Point
from torchmedic.observe.heap.walk import Held
from torchmedic.observe.heap.weighing import Weight

_MIN_SPANS = 4  # between two looks each
_MIN_GRAPHS = 16  # in items that come with the steps; fewer may be an accident
_BYTES = ("bytes", "mass")
_PIECES = ("reached", "mass")
_MORE_THAN_ONE = 1.5  # tensor in each piece
_MIN_BYTES = 64 << 20  # that are reported by themselves
_KEY = re.compile(r"\[[^\]]*\]|\.\d+")
_MAX_PLAIN_BYTES = 1 << 10  # bytes of one item that is just a number

What = Literal["graphs", "chain", "data", "cycles", "hooks"]


class Growth(NamedTuple):
    """One holder that grows.

    `what` it keeps: items with their graphs, one tensor whose graph grows, data, circles of leaves and gradients, or
    hooks.
    `period` is how it grows: `step`, `batch`, or one of the longer periods that `observe/heap/growth_watch.py` marks.
    `rate` is in items or bytes per period.
    """

    what: What
    key: Key
    held: Held
    period: str
    rate: float
    periods: int
    first: Look
    last: Look
    weight: Weight | None

    @property
    def bytes_held(self) -> float:
        """Bytes of tensors and data, without graphs."""
        if self.held.kind in _BYTES:
            return float(self.held.size)
        return self.held.size * (self.weight.host + self.weight.device) if self.weight is not None else 0.0

    @property
    def bytes_per_period(self) -> float:
        if self.held.kind in _BYTES:
            return self.rate
        return self.rate * (self.weight.host + self.weight.device) if self.weight is not None else 0.0

    @property
    def on_device(self) -> bool:
        return self.weight is not None and self.weight.device > self.weight.host


def growths(watch: LeakWatch) -> Iterator[Growth]:
    """Everything that grows by now, whether or not that is bad: single containers first, linked structures last."""
    all_found = list(_growths(watch))
    hooks = any(each.what == "hooks" for each in all_found)
    alike = Counter(_who(each.held) for each in all_found)
    for found in all_found:
        held = found.held
        if hooks and found.what != "hooks" and alike[_who(held)] > 1:
            continue  # each of the hooks has one of its own
        pieces = watch.tracks.get((0, f"reached {held.name}"))
        several = (
            found.weight is None or found.weight.graphs > _MORE_THAN_ONE
        )  # in each piece, so that these are filled
        inner = held.inner or (pieces[-1].held.inner if pieces and several else "")
        yield found._replace(held=held._replace(inner=inner))
    yield from _together(all_found)


def _who(held: Held) -> tuple[str, str, str, int]:
    return held.name, held.kind, held.file, held.local


def _together(found: list[Growth]) -> Iterator[Growth]:
    """Join holders under several keys of one container that hold little data each."""
    families: dict[tuple[str, str, int, str], list[Growth]] = {}
    for each in found:
        held = each.held
        if each.what == "data" and held.kind == "items" and held.name != (whole := _KEY.sub("[...]", held.name)):
            families.setdefault((whole, held.file, held.local, each.period), []).append(each)
    for (name, *_), members in families.items():
        if len(members) > 1 and all(each.bytes_held < _MIN_BYTES for each in members):
            first = max(members, key=lambda each: each.bytes_held)
            items = sum(each.held.size for each in members)
            weights = [(each.held.size / items, each.weight) for each in members if each.weight is not None]
            mean = first.weight and first.weight._replace(
                host=sum(share * weight.host for share, weight in weights),
                device=sum(share * weight.device for share, weight in weights),
            )
            yield first._replace(
                key=(0, name),
                held=first.held._replace(name=_common([each.held.name for each in members]), size=items),
                rate=sum(each.rate for each in members),
                weight=mean,
            )


def _common(names: list[str]) -> str:
    """One name for several that differ in their keys only; a key that all of them have stays."""
    keys = zip(*(_KEY.findall(name) for name in names), strict=True)
    shown = iter([alike[0] if len(set(alike)) == 1 else "[...]" for alike in keys])
    return _KEY.sub(lambda _: next(shown), names[0])


def _growths(watch: LeakWatch) -> Iterator[Growth]:
    for key, points in sorted(watch.tracks.items(), key=lambda track: track[1][-1].held.kind in _PIECES):
        found = _chain(key, points, watch.looks) if points[-1].held.kind == "age" else _container(key, points)
        if found is not None:
            yield found


def _chain(key: Key, points: list[Point], looks: list[Look]) -> Growth | None:
    first, last = carried_since(points, looks), points[-1].look
    if first is None:
        return None
    return Growth("chain", key, points[-1].held, "step", 1.0, last.step - first.step, first, last, None)


def _container(key: Key, points: list[Point]) -> Growth | None:
    held = points[-1].held
    if held.kind == "cycles":
        rate = _steady(points, lambda look: look.step)
        first, last = points[0].look, points[-1].look
        enough = rate is not None and held.size >= _MIN_GRAPHS
        return (
            Growth("cycles", key, held, "step", rate or 0.0, last.step - first.step, first, last, None)
            if enough
            else None
        )
    weight = next((point.weight for point in reversed(points) if point.weight is not None), None)
    if held.bounded or len(points) <= _MIN_SPANS:
        return None
    if held.kind == "reached" and len({point.held.old for point in points[-_MIN_SPANS:]}) > 1:
        return None  # the oldest of them is not what it was
    if held.kind == "mass" and held.old <= points[-_MIN_SPANS].held.old:
        return None  # the pieces get bigger: there are not more of them
    if held.kind == "items" and (
        weight is None or (not weight.graphs and weight.host + weight.device < _MAX_PLAIN_BYTES)
    ):
        return None
    what: What = "graphs" if held.kind == "reached" or (weight is not None and weight.graphs) else "data"
    what = "hooks" if held.kind == "hooks" else what
    by_step = _steady(points, lambda look: look.step)
    by_batch = _steady(points, lambda look: look.batch) if points[0].look.step == points[-1].look.step else None
    marked = _by_mark(points) if by_step is None or by_step < 0.9 else None
    first, last = points[0].look, points[-1].look
    if marked is not None:
        period, rate, periods = marked
        return Growth(what, key, held, period, rate, periods, first, last, weight)
    if by_step is not None:
        if what != "data" and held.size < _MIN_GRAPHS:
            return None
        return Growth(what, key, held, "step", by_step, last.step - first.step, first, last, weight)
    if by_batch is not None:
        return Growth(what, key, held, "batch", by_batch, last.batch - first.batch, first, last, weight)
    return None


def _steady(points: list[Point], clock: Callable[[Look], int]) -> float | None:
    """How much comes per tick, where it comes all the time and no slower at the end."""
    ends = [points[0]]
    for point in points[1:]:
        if clock(point.look) > clock(ends[-1].look):
            ends.append(point)
    spans = [
        (clock(after.look) - clock(before.look), after.held.size - before.held.size)
        for before, after in itertools.pairwise(ends)
    ]
    if len(spans) < _MIN_SPANS:
        return None
    ticks, more = sum(span[0] for span in spans), sum(span[1] for span in spans)
    rate = more / ticks
    if sum(1 for _, rise in spans if rise > 0) < _MIN_SPANS or spans[-1][1] + spans[-2][1] <= 0:
        return None
    slack = 0 if ends[0].held.kind in _BYTES else 1
    return rate if all(rise >= 0.5 * rate * length - slack for length, rise in spans) else None


def _by_mark(points: list[Point]) -> tuple[str, float, int] | None:
    """The longer period with which it grows, by as much each time."""
    best = None
    for mark in points[-1].look.marks:
        firsts: dict[int, int] = {}
        for point in points:
            firsts.setdefault(point.look.marks.get(mark, 0), point.held.size)
        ends = list(firsts.items())
        rises = [(size - before) / (end - begin) for (begin, before), (end, size) in itertools.pairwise(ends)]
        if len(rises) >= _MIN_SPANS and min(rises) > 0 and max(rises) <= 1.5 * min(rises):
            (begin, before), (end, size) = ends[0], ends[-1]
            found = (mark.partition(" ")[0], (size - before) / (end - begin), end - begin)
            best = found if best is None or found[2] < best[2] else best
    return best
