"""Losses whose leaves are made anew in every step, so that no tensor of an optimizer ever gets a gradient."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.detect.loop.incident import LeafMadeAnew, LoopIncident
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, callee, has_line, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file

_MIN_WALKS = 3  # losses, each with leaves of its own


def find(habits: Habits, steps: list[Event]) -> Iterator[LoopIncident]:
    reach = habits.reach
    if reach.reached_owned or any(event.fact.has_gradient for event in steps):
        return
    if len(reach.new_leaves) < _MIN_WALKS or not all(reach.new_leaves):
        return
    stepping = {event.who for event in steps}
    watched = habits.optimizers.get(steps[-1].who)
    optimizer = watched.optimizer if watched is not None else None
    if len(stepping) != 1 or watched is None or optimizer is None:
        return
    if not all(tensor.requires_grad for tensor in watched.parameters):
        return
    made = list(_makers(habits, watched.built))
    yield LeafMadeAnew(
        step=steps[-1].step,
        cause=made[0] if len(made) == 1 else watched.built or steps[-1].place,
        optimizer=watched.number,
        update=steps[-1].place,
        updates=len(steps),
        held=len(watched.parameters),
        built=watched.built if len(made) == 1 else None,
    )


def _makers(habits: Habits, built: Place | None) -> Iterator[Place]:
    """The lines that make a leaf in each step: in a loop, or in a function that does not build the optimizer."""
    files = dict.fromkeys(event.place.file for event in habits.events if event.place.line)
    for file in filter(is_user_file, files):
        repeated = [
            node
            for node in nodes_in(syntax_tree(file))
            if isinstance(node, ast.For | ast.While)
            or (isinstance(node, FUNCTIONS) and node.name != "__init__" and not _has(node, file, built))
        ]
        calls = (node for outer in repeated for node in ast.walk(outer) if isinstance(node, ast.Call))
        lines = dict.fromkeys(call.lineno for call in calls if _makes_leaf(call))
        yield from (Place(file, line) for line in lines)


def _has(function: ast.stmt, file: str, place: Place | None) -> bool:
    return place is not None and place.file == file and has_line(function, place.line)


def _makes_leaf(call: ast.Call) -> bool:
    if any(isinstance(given, ast.Constant) and given.value is False for given in call.args):
        return False  # `requires_grad_(False)` freezes
    return callee(call) in ("requires_grad_", "Parameter") or any(
        given.arg == "requires_grad" and isinstance(given.value, ast.Constant) and given.value.value is True
        for given in call.keywords
    )
