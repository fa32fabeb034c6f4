"""A loss whose graph holds more of earlier steps in every step."""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect.loop.incident import GrowingGraph, LoopIncident
from torchmedic.detect.trends.heap_growth import reaches_back_further
from torchmedic.observe.loop.ledger import Habits

_MIN_LOOKS = 6
_MIN_STEPS = 10  # a history that is cut on purpose has been cut by then


def find(habits: Habits) -> Iterator[LoopIncident]:
    growth = habits.growth
    sizes = growth.sizes
    if len(sizes) < _MIN_LOOKS or sizes[-1][0] - sizes[0][0] < _MIN_STEPS:
        return
    if reaches_back_further([old for _, old, _ in sizes]):
        yield GrowingGraph(step=sizes[-1][0], cause=growth.backward, held=growth.carried, sizes=sizes)
