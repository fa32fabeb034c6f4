"""What a loop spends on giving memory back to the driver in every step."""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits

_CALLS = 8
_SHARE = 0.03


def find(habits: Habits) -> Iterator[LoopIncident]:
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
    last = calls[-_CALLS:]
    if len(last) < _CALLS or len({call.site for call, _, _ in last}) != 1:
        return
    if last[-1][0].step - last[0][0].step < _CALLS // 2 - 1:
        return  # nothing is trained in between
    whole = last[-1][1] - last[0][1]
    spent = sum(took for _, _, took in last[:-1])
    if whole <= 0 or spent / whole <= _SHARE:
        return
    yield LoopIncident(
        kind="empty cache",
        step=last[-1][0].step,
        cause=last[-1][0].place,
        facts={"share": spent / whole, "each": spent / (len(last) - 1), "calls": len(last) - 1},
    )
