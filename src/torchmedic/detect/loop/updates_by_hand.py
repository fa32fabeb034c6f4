"""A loop without an optimizer that moves its weights after every backward, and leaves the gradients as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.detect.loop.incident import GradientsNeverCleared, LoopIncident
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, LOOPS, innermost, syntax_tree

_MIN_UPDATES = 6


def find(habits: Habits) -> Iterator[LoopIncident]:
    if habits.optimizers:
        return
    norms, backward = habits.by_hand.norms, habits.by_hand.backward
    if len(norms) >= _MIN_UPDATES:
        yield GradientsNeverCleared(
            step=len(norms),
            cause=_update_by_hand(backward),
            backward=backward,
            updates=len(norms),
            norms=(norms[0], norms[-1]),
            is_by_hand=True,
        )


def _update_by_hand(backward: Place) -> Place:
    """The first statement behind a backward that computes with a gradient; that backward where none is seen."""
    around = innermost(syntax_tree(backward.file), backward.line, LOOPS | FUNCTIONS)
    lines = [
        node.lineno
        for node in (ast.walk(around) if around is not None else ())
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and node.lineno > backward.line
        if any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in ast.walk(node.value))
    ]
    return Place(backward.file, min(lines)) if lines else backward
