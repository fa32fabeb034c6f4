"""Lines that cost time of the device in every step: to give memory back to the driver, to wait for the device."""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect.loop.incident import EmptyCacheEveryStep, LoopIncident, NeedlessWait
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits

_MIN_CALLS = 8
_MIN_SHARE = 0.03  # share of the time of a step
# Share of the time of a step. To ask for the memory again costs four times as much on top (results/waits-h200.md).
_MIN_EMPTYING_SHARE = 0.01


def find(habits: Habits) -> Iterator[LoopIncident]:
    yield from _emptied_caches(habits)
    for waited in habits.waited:
        if waited.share > _MIN_SHARE:
            yield NeedlessWait(step=habits.steps, cause=waited.place, waited=waited)


def _emptied_caches(habits: Habits) -> Iterator[LoopIncident]:
    """`empty_cache` from one place, again and again between updates, for more than a small share of the time."""
    begun: Event | None = None
    calls: list[tuple[Event, float, float]] = []
    for event in habits.events:
        if event.kind == "gap":
            begun, calls = None, []
        elif event.kind == "empty cache":
            begun = event
        elif event.kind == "cache emptied" and begun is not None:
            calls.append((begun, *event.fact))
    last = calls[-_MIN_CALLS:]
    if len(last) < _MIN_CALLS or len({call.site for call, _, _ in last}) != 1:
        return
    if last[-1][0].step - last[0][0].step < _MIN_CALLS // 2 - 1:
        return  # nothing is trained in between
    whole = last[-1][1] - last[0][1]
    spent = sum(took for _, _, took in last[:-1])
    if whole <= 0 or spent / whole <= _MIN_EMPTYING_SHARE:
        return
    yield EmptyCacheEveryStep(
        step=last[-1][0].step,
        cause=last[-1][0].place,
        share=spent / whole,
        each=spent / (len(last) - 1),
        calls=len(last) - 1,
    )
