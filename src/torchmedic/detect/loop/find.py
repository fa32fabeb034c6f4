"""The ledger of a loop -> incidents: what the loop does in every step that is surely a mistake.

An incident is made only where the evidence is complete: a habit that was seen in several steps in a row, without an
exception. What could be another algorithm (gradients that somebody writes to by hand, another optimizer that steps in
between, no new forward pass) makes no incident.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect.loop import (
    batchless,
    built_anew,
    by_products,
    clips,
    data,
    device_time,
    freezes_without_effect,
    gradients,
    growing_graph,
    leftovers,
    modes,
    never_stepped,
    own_states,
    pairing,
    parameters,
    pictures,
    repeated_layers,
    repeated_numbers,
    schedules,
    shuffled_apart,
    standstill,
    thrown_away,
    undone,
    updates_by_hand,
    warming,
)
from torchmedic.detect.loop.incident import LoopIncident
from torchmedic.observe.loop.ledger import Habits

_FINDERS = (
    gradients.find,
    updates_by_hand.find,
    parameters.find,
    schedules.find,
    standstill.find,
    warming.find,
    never_stepped.find,
    built_anew.find,
    clips.find,
    modes.find,
    data.find,
    device_time.find,
    freezes_without_effect.find,
    growing_graph.find,
    leftovers.find,
    undone.find,
    pairing.find,
    shuffled_apart.find,
    thrown_away.find,
    batchless.find,
    own_states.find,
    repeated_numbers.find,
    repeated_layers.find,
    pictures.find,
    by_products.find,
)


def incidents(habits: Habits) -> Iterator[LoopIncident]:
    """Everything that the ledger shows to be wrong by now."""
    for find in _FINDERS:
        yield from find(habits)
