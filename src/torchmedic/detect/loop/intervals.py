"""The ledger of a loop, cut at the updates of one optimizer: what happened to its gradients from one to the next."""

from __future__ import annotations

from collections.abc import Sequence

from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.witness import State

_BEGINS = frozenset({"backward", "step", "zero", "clip", "unscale"})
_ENDS = frozenset({"backward done", "step done", "step skipped", "zero done", "clip done", "unscale done"})


class Interval:
    """What happened between two updates by one optimizer, the later update included.

    `acts` are the events that matter to it, in order: a `backward` that reached its witness, a `zero` that cleared it,
    `clip`, `unscale`, `scale`, `scaler step`, the `step` of another optimizer, `forward`, `fetch`. `touched` says
    that somebody else wrote to the gradient or replaced it: by hand, through a hook, for another algorithm. Nothing is
    claimed of such an interval.
    """

    def __init__(self) -> None:
        self.acts: list[Event] = []
        self.touched = False
        self.step: Event | None = None
        self.norms: list[float | None] = []  # of the witness, before each backward
        self.backwards = 0  # of any loss
        self.cleared_last = False  # nothing reached the witness between the last clearing and the step
        self.skipped = False  # GradScaler left one step out
        self.at_step: State | None = None

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.acts if event.kind == kind]


def intervals(events: Sequence[Event], number: int) -> list[Interval]:
    """The complete intervals of an optimizer. Where the ledger slept, a new one begins and the torn one is left out."""
    found: list[Interval] = []
    current = Interval()
    known: State | None = None
    torn = False
    began: dict[str, Event] = {}
    for event in events:
        state = event.states.get(number)
        if event.kind == "gap":
            current, known, torn = Interval(), None, True
            continue
        if event.kind in _BEGINS:
            began[event.kind] = event
            if known is not None and state is not None and state[:2] != known[:2]:
                current.touched = True
        _note(current, event, number, began)
        if event.kind in _ENDS and state is not None:
            known = state
        if event.kind == "step done" and event.who == number:
            if current.step is not None and not torn:
                found.append(current)
            current, torn = Interval(), False
    return found


def _note(current: Interval, event: Event, number: int, began: dict[str, Event]) -> None:
    """Add what an event means to the optimizer of this number."""
    mine = event.who == number
    match event.kind:
        case "backward":
            current.backwards += 1
            current.norms.append(event.fact.norms.get(number))
        case "step" if mine:
            current.step, current.at_step = event, event.states.get(number)
        case "step" | "forward" | "fetch" | "scale":
            current.acts.append(event)
        case "scaler step" if mine:
            current.acts.append(event)
        case "step skipped" if mine:
            current.skipped = True
        case "unscale done" if mine and "unscale" in began:
            current.acts.append(began["unscale"])
        case "backward done" | "clip done" | "zero done":
            begin = began.get(event.kind.removesuffix(" done"))
            if begin is not None and begin.states.get(number) != event.states.get(number):
                current.acts.append(begin)
                if event.kind != "clip done":
                    current.cleared_last = event.kind == "zero done"
