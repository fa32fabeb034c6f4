"""Optimizers that are built for a single update each, so that what they would remember is lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident, OptimizerMadeAnew
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, has_line, innermost, syntax_tree

_MIN_UPDATES = 12


def find(habits: Habits) -> Iterator[LoopIncident]:
    by_place: dict[Place, list[Event]] = {}
    for event in habits.events:
        if event.kind == "step" and event.fact.whose.built is not None:
            by_place.setdefault(event.fact.whose.built, []).append(event)
    for built, updates in by_place.items():
        steps = updates[-_MIN_UPDATES:]
        if len(steps) == _MIN_UPDATES and _is_anew(steps) and _are_in_a_row(habits.events, steps):
            yield OptimizerMadeAnew(
                step=steps[-1].step,
                cause=_repeated(built, steps[-1]),
                optimizer=steps[-1].who,
                kind=type(steps[-1].fact.whose.optimizer).__name__,
                update=steps[-1].place,
                updates=len(updates),
            )


def _is_anew(steps: list[Event]) -> bool:
    """Whether each update is by another optimizer, of the same weights and with the same rate, for the first time."""
    facts = [event.fact for event in steps]
    tensors = {id(fact.first() if fact.first is not None else None) for fact in facts}
    is_same = len(tensors) == 1 and facts[0].first is not None and facts[0].first() is not None
    is_new = len({event.who for event in steps}) == len(steps) and all(fact.is_fresh for fact in facts)
    return is_same and is_new and all(fact.has_gradient and fact.rates == facts[0].rates for fact in facts)


def _are_in_a_row(events: list[Event], steps: list[Event]) -> bool:
    """Whether each update begins with the weights that the last one left, not with those of another client or task."""
    left = {event.who: event.states.get(event.who) for event in events if event.kind == "step done"}
    for before, after in itertools.pairwise(steps):
        then, now = left.get(before.who), after.states.get(after.who)
        if then is None or now is None or then.weight_writes != now.weight_writes:
            return False
    return True


def _repeated(built: Place, step: Event) -> Place:
    """The line that is run in each step: that which builds the optimizer, or the call of a function that does."""
    caller = step.fact.whose.caller
    function = innermost(syntax_tree(built.file), built.line, FUNCTIONS)
    is_same = built.file == step.place.file and (function is None or has_line(function, step.place.line))
    return built if is_same or caller is None else caller
