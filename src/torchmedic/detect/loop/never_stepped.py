"""Gradients that are computed and cleared again and again, and no optimizer that ever steps."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident, OptimizerNeverSteps
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file

_MIN_BACKWARDS = 16  # whose gradients were cleared


def find(habits: Habits) -> Iterator[LoopIncident]:
    """The only optimizer never steps, and nobody else updates its weights."""
    events = habits.events
    living = [watched for watched in habits.optimizers.values() if watched.optimizer is not None]
    if len(living) != 1 or any(event.kind in ("step", "step skipped", "scaler step") for event in events):
        return
    watched = living[0]
    backwards = [event for event in events if event.kind == "backward"]
    cleared = sum(_clears(before, after, watched.number) for before, after in itertools.pairwise(events))
    if habits.steps or cleared < _MIN_BACKWARDS or len(backwards) < _MIN_BACKWARDS:
        return
    writes = {state.weight_writes for event in events if (state := event.states.get(watched.number)) is not None}
    if len(writes) != 1:
        return  # the weights are updated by hand
    backward = backwards[-1].place
    named = _named_step(dict.fromkeys(event.place.file for event in events if event.place.line))
    yield OptimizerNeverSteps(
        step=0,
        cause=named or backward,
        optimizer=watched.number,
        backward=backward,
        backwards=len(backwards),
        cleared=cleared,
        is_named=named is not None,
    )


def _clears(before: Event, after: Event, number: int) -> bool:
    """Whether a call of `zero_grad` has cleared a gradient of the optimizer."""
    if (before.kind, after.kind) != ("zero", "zero done") or before.who != after.who:
        return False
    state, then = before.states.get(number), after.states.get(number)
    return state is not None and then is not None and state[:2] != then[:2] and max(state.gradient) > 0


def _named_step(files: dict[str, None]) -> Place | None:
    """A statement `optimizer.step`, which names the method and does not call it."""
    for file in filter(is_user_file, files):
        for node in nodes_in(syntax_tree(file)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Attribute) and node.value.attr == "step":
                return Place(file, node.lineno)
    return None
