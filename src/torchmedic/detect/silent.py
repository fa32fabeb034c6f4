"""The ledger of a loop -> incidents: what the loop does in every step that cannot be meant.

An incident is made only where the evidence is complete: a habit that was seen in several steps in a row, without an
exception. What could be another algorithm (gradients that somebody writes to by hand, another optimizer that steps in
between, no new forward pass) makes no incident.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect import (
    cache_habits,
    data_habits,
    evaluation_habits,
    gradient_habits,
    growing_graph,
    leftovers,
    mode_habits,
    ownership,
    schedule_habits,
    wait_habits,
)
from torchmedic.detect.incident import LoopIncident
from torchmedic.observe.habits import Habits

_FINDERS = (
    gradient_habits.find,
    ownership.find,
    schedule_habits.find,
    mode_habits.find,
    data_habits.find,
    cache_habits.find,
    wait_habits.find,
    growing_graph.find,
    leftovers.find,
    evaluation_habits.find,
)


def incidents(habits: Habits) -> Iterator[LoopIncident]:
    """Everything that the ledger shows to be wrong by now."""
    for find in _FINDERS:
        yield from find(habits)
