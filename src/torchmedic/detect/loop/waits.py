"""Lines that make the host wait for the device in every step, where that costs more than a little."""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident
from torchmedic.observe.loop.ledger import Habits

_SHARE = 0.03


def find(habits: Habits) -> Iterator[LoopIncident]:
    for waited in habits.waited:
        if waited.share > _SHARE:
            yield LoopIncident(
                kind="needless wait",
                step=habits.steps,
                cause=waited.place,
                facts={
                    "name": waited.name,
                    "uploads": waited.uploads,
                    "share": waited.share,
                    "waits": waited.waits,
                    "idle": waited.idle,
                    "step": waited.step,
                },
            )
