"""A graph that is carried from step to step and grows: behind the loss (TM620), or behind a variable (TM451).

Both are the same sign: at every look the graph holds more nodes of earlier steps than at the look before. The loss is
looked at by `observe/loop/graph_growth.py`, the variables by `observe/heap/growth_watch.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torchmedic.detect.loop.incident import GrowingGraph, LoopIncident
from torchmedic.observe.heap.growth_watch import Look, Point
from torchmedic.observe.loop.ledger import Habits

_MIN_LOOKS_AT_LOSS = 6
_MIN_STEPS_OF_LOSS = 10  # a history that is cut on purpose has been cut by then
_MIN_LOOKS_AT_HOLDER = 4
_MIN_STEPS_OF_HOLDER = 24
_MAX_EXACT_NODES = 1000  # nodes of the graph behind a variable; more are not counted for sure


def find(habits: Habits) -> Iterator[LoopIncident]:
    """A loss whose graph holds more of earlier steps in every step."""
    growth = habits.growth
    sizes = growth.sizes
    if len(sizes) < _MIN_LOOKS_AT_LOSS or sizes[-1][0] - sizes[0][0] < _MIN_STEPS_OF_LOSS:
        return
    if _grows([old for _, old, _ in sizes]):
        yield GrowingGraph(step=sizes[-1][0], cause=growth.backward, held=growth.carried, sizes=sizes)


def carried_since(points: Sequence[Point], looks: Sequence[Look]) -> Look | None:
    """The look after which a variable began to carry its graph on; None where it does not.

    Such a variable is renewed all the time, and its graph goes back to one and the same first node.

    Args:
        points: What was seen of the variable.
        looks: All looks.
    """
    recent = points[-_MIN_LOOKS_AT_HOLDER:]
    if len(recent) < _MIN_LOOKS_AT_HOLDER or len({point.held.size for point in recent}) > 1:
        return None
    if not _grows([point.held.old for point in recent], _MAX_EXACT_NODES):
        return None  # what it reaches back to is old and stays as it is
    last, age = recent[-1].look, recent[-1].held.size
    first = next((look for look in looks if look.sequence > age), last)
    return first if last.step - first.step >= _MIN_STEPS_OF_HOLDER else None


def _grows(old_nodes: Sequence[int], exact_below: int = 1 << 62) -> bool:
    """Whether there are more old nodes at every look; counts from `exact_below` on say only "so many or more"."""
    return all(after > before or before >= exact_below for before, after in itertools.pairwise(old_nodes))
