"""A loss whose graph holds more of earlier steps in every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torchmedic.detect.loop.incident import GrowingGraph, LoopIncident
from torchmedic.observe.loop.ledger import Habits

_MIN_LOOKS = 6
_MIN_SPAN_STEPS = 10  # steps: what is cut after some steps on purpose has been cut by then


def find(habits: Habits) -> Iterator[LoopIncident]:
    growth = habits.growth
    sizes = growth.sizes
    if len(sizes) < _MIN_LOOKS or sizes[-1][0] - sizes[0][0] < _MIN_SPAN_STEPS:
        return
    if any(later[1] <= earlier[1] for earlier, later in itertools.pairwise(sizes)):
        return
    carried = growth.carried
    yield GrowingGraph(
        step=sizes[-1][0],
        cause=growth.backward,
        carried=carried.place if carried is not None else None,
        name=carried.name if carried is not None else "",
        is_attribute=carried is not None and carried.is_attribute,
        sizes=sizes,
    )
