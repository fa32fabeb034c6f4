"""Batches at the end of an epoch that are too few for an accumulation cycle."""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect.loop.incident import LeftoverMicroBatches, LoopIncident
from torchmedic.detect.loop.intervals import intervals
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits

_MIN_CYCLES = 2


def find(habits: Habits) -> Iterator[LoopIncident]:
    passes = {event.fact.length for event in habits.events if event.kind == "fetch" and event.fact.length}
    datasets = {event.fact.dataset for event in habits.events if event.kind == "fetch"}
    if len(passes) != 1 or len(datasets) != 1:
        return
    length = passes.pop()
    for number in habits.optimizers:
        known = [part for part in intervals(habits.events, number) if not part.touched]
        sizes = [len(part.of("fetch")) for part in known if len(part.of("backward")) == len(part.of("fetch"))]
        size = max(set(sizes), key=sizes.count, default=0)
        if not 2 <= size < length or sizes.count(size) < _MIN_CYCLES or length % size == 0:
            continue
        end = _first_end(habits.events, number, size)
        if end is None or end[0] != length % size:
            continue
        left, is_lost = end
        step = known[-1].step
        assert step is not None
        yield LeftoverMicroBatches(
            step=step.step, cause=step.place, optimizer=number, left=left, size=size, length=length, is_lost=is_lost
        )


def _first_end(events: list[Event], number: int, size: int) -> tuple[int, bool] | None:
    """How many calls of backward have come since the last update when a new pass begins, and if they were cleared.

    None where that is open, or where the batches of the next pass make the cycle whole: then nothing is wrong.
    """
    backwards, lost = 0, 0
    left: int | None = None
    begun = False
    for event in events:
        if event.kind == "gap":
            return None
        if event.kind == "fetch" and event.fact.position <= 1:
            if begun and lost and not backwards:
                return lost, True
            left = backwards + lost if begun else None
            begun = True
        elif event.kind == "backward":
            backwards += 1
        elif event.kind == "zero":
            lost, backwards = lost + backwards, 0
        elif event.kind in ("step", "step skipped") and event.who in (number, 0):
            if left is not None:
                return (left, False) if backwards != size else None
            backwards = lost = 0
    return None
