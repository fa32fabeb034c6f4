"""What goes on in evaluation mode that belongs to training."""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident
from torchmedic.observe.loop.ledger import Habits


def find(habits: Habits) -> Iterator[LoopIncident]:
    for dropped in habits.evaluation.dropped.values():
        yield LoopIncident(
            kind="dropout in evaluation",
            step=habits.steps,
            cause=dropped.place,
            facts={"name": dropped.name, "share": dropped.share},
        )
