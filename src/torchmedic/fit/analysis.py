"""From the course of memory to the answer: the peak, its line, what holds it, and whether a card has room for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchmedic.fit.allocator import Allocator, Block, OutOfMemory
from torchmedic.fit.cards import Card
from torchmedic.records.fit import KINDS, NOWHERE, Batch, Line, Need, Plan, Prediction, Row, Trace

_MAX_LINES = 8  # lines of source that the table names
_BY_LINE = ("activations",)  # kinds that the table splits by line
_PHASES = {"temporaries of backward": "backward", "gradients": "backward"} | dict.fromkeys(
    ("temporaries of the optimizer", "optimizer state"), "the step of the optimizer"
)


class Replay(NamedTuple):
    """The allocator at the end of a course."""

    allocated: int
    reserved: int
    retries: int
    peak: int  # the number of the event at which most was allocated
    fits: bool


def replay(
    trace: Trace, *, sizes: Sequence[int] | None = None, capacity: int | None = None, expandable: bool = False
) -> Replay:
    """Play a course of memory to the allocator; with other sizes if they are given."""
    allocator = Allocator(capacity, expandable=expandable)
    blocks: dict[int, Block] = {}
    asked = trace.sizes if sizes is None else sizes
    peak = most = 0
    for position, event in enumerate(trace.events):
        if event < 0:
            allocator.release(blocks.pop(~event))
            continue
        try:
            blocks[event] = allocator.allocate(asked[event])
        except OutOfMemory:
            return Replay(allocator.peak_allocated, allocator.peak_reserved, allocator.retries, peak, False)
        if allocator.allocated > most:
            most, peak = allocator.allocated, position
    return Replay(allocator.peak_allocated, allocator.peak_reserved, allocator.retries, peak, True)


def need_of(trace: Trace, card: Card, *, sizes: Sequence[int] | None = None, expandable: bool = False) -> Need:
    """What a course needs, and whether the card has it."""
    free = replay(trace, sizes=sizes, expandable=expandable)
    room = card.memory - card.context
    if free.reserved <= room:
        return Need(allocated=free.allocated, reserved=free.reserved, context=card.context, fits=True)
    tight = replay(trace, sizes=sizes, capacity=room, expandable=expandable)
    reserved = tight.reserved if tight.fits else free.reserved
    return Need(
        allocated=free.allocated, reserved=reserved, context=card.context, fits=tight.fits, retries=tight.retries
    )


def alive_at(trace: Trace, position: int) -> list[int]:
    """The numbers of the storages that are alive after an event."""
    alive: dict[int, None] = {}
    for event in trace.events[: position + 1]:
        if event >= 0:
            alive[event] = None
        else:
            del alive[~event]
    return list(alive)


class Peak(NamedTuple):
    """The moment at which most is allocated."""

    phase: str
    line: Line
    rows: tuple[Row, ...]


def peak_of(trace: Trace, need: Need) -> Peak:
    """What is alive at the peak: kinds, lines, and the rest up to what the card needs, so that the rows add up."""
    if not trace.events:
        return Peak("forward", NOWHERE, ())
    position = replay(trace).peak
    alive = alive_at(trace, position)
    totals: dict[tuple[str, Line], tuple[int, int]] = {}
    for number in alive:
        kind = KINDS[trace.kinds[number]]
        line = trace.lines[trace.places[number]] if kind in _BY_LINE else NOWHERE
        nbytes, count = totals.get((kind, line), (0, 0))
        totals[kind, line] = (nbytes + trace.sizes[number], count + 1)
    rows = [Row(kind, nbytes, line, count) for (kind, line), (nbytes, count) in totals.items()]
    rows.sort(key=lambda row: (KINDS.index(row.kind), -row.nbytes))
    rows = _shortened(rows)
    requested = sum(row.nbytes for row in rows)
    rows += [
        Row("rounding of the allocator", need.allocated - requested),
        Row("reserved, not in use", need.reserved - need.allocated),
        Row("CUDA context and libraries", need.context),
    ]
    last = trace.events[position]
    phase = _PHASES.get(KINDS[trace.kinds[last]], "forward")
    line = trace.lines[trace.user_places[last]]
    return Peak(phase, line if line.file else trace.lines[trace.places[last]], tuple(row for row in rows if row.nbytes))


def _shortened(rows: list[Row]) -> list[Row]:
    """The largest lines of each kind, and one row for the others."""
    found: list[Row] = []
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        found += of_kind[:_MAX_LINES]
        others = of_kind[_MAX_LINES:]
        if others:
            found.append(
                Row(f"{kind}, other lines", sum(row.nbytes for row in others), count=sum(row.count for row in others))
            )
    return found


def prediction_of(
    trace: Trace, card: Card, *, limited: bool, batch: Batch | None = None, plans: tuple[Plan, ...] = ()
) -> Prediction:
    """The answer for a course of memory. `limited` is that the card was asked for."""
    need = need_of(trace, card)
    peak = peak_of(trace, need)
    return Prediction(
        card=card.name if limited else "",
        memory=card.memory if limited else None,
        need=need,
        phase=peak.phase,
        line=peak.line,
        rows=peak.rows,
        seconds=trace.seconds,
        batch=batch or Batch(),
        plans=plans,
        notes=tuple(trace.notes),
    )
