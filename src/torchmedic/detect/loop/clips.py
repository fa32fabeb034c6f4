"""Gradients that are clipped at a time when it has no effect: before `backward`, or after the update that uses them.

In each turn the clip comes before the first `backward`, gradients are cleared before that `backward`, and no clip
follows up to the update. So what it clips is nothing, or it is cleared before anybody uses it. The clipped tensors must
be known to be those of the only optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torchmedic.detect.loop.incident import ClipWithoutEffect, LoopIncident
from torchmedic.detect.loop.intervals import intervals
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits

_MIN_UPDATES = 4
_LARGE_BOUND = 100.0  # with such a bound the norm may only be measured


def find(habits: Habits) -> Iterator[LoopIncident]:
    if len(habits.optimizers) != 1:
        return
    number = next(iter(habits.optimizers))
    known = intervals(habits.events, number)[-_MIN_UPDATES:]
    turns = _turns(habits.events, number)[-_MIN_UPDATES:]
    if min(len(known), len(turns)) < _MIN_UPDATES or any(part.touched for part in known):
        return
    clips = [_useless_clip(turn) for turn in turns]
    last, step = clips[-1], known[-1].step
    if (
        last is None
        or step is None
        or last.who != number
        or any(clip is None or clip.site != last.site for clip in clips)
    ):
        return
    yield ClipWithoutEffect(
        step=step.step,
        cause=last.place,
        optimizer=number,
        update=step.place,
        bound=last.fact,
        updates=len(turns),
        is_late=_kinds(turns[-1]).index("clip") < _kinds(turns[-1]).index("zero"),
    )


def _turns(events: Sequence[Event], number: int) -> list[list[Event]]:
    """The events from the end of each update to the end of the next one, where the ledger was awake all the time."""
    found: list[list[Event]] = []
    turn: list[Event] | None = None
    for event in events:
        if event.kind == "gap":
            turn = None
        elif event.kind == "step done" and event.who == number:
            found += [turn] if turn is not None else []
            turn = []
        elif turn is not None:
            turn.append(event)
    return found


def _useless_clip(turn: list[Event]) -> Event | None:
    """The first clip of a turn, if all of them come before `backward`, and gradients are cleared before it as well."""
    kinds = _kinds(turn)
    if not {"clip", "zero", "backward"}.issubset(kinds) or "step skipped" in kinds:
        return None
    first = kinds.index("backward")
    if "clip" in kinds[first:] or "zero" not in kinds[:first]:
        return None
    clip = turn[kinds.index("clip")]
    is_bound = isinstance(clip.fact, float) and math.isfinite(clip.fact) and 0 < clip.fact < _LARGE_BOUND
    return clip if is_bound and clip.place.line else None


def _kinds(turn: list[Event]) -> list[str]:
    return [event.kind for event in turn]
