"""Passes over the data with the same random numbers, and the line that sets the generator back for each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident, RandomNumbersRepeat
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, LOOPS, callee, nodes_in
from torchmedic.source.user_variables import user_trees

_SEEDING = frozenset("seed_everything set_seed".split())  # of libraries
_TORCH = frozenset("torch torch.random".split())
_SETTING = "deterministic"


def find(habits: Habits) -> Iterator[LoopIncident]:
    found = habits.passes.found
    if found is None:
        return
    places = set(_seedings())
    yield RandomNumbersRepeat(
        step=habits.steps,
        cause=next(iter(places)) if len(places) == 1 else found.place,
        loading=found.place,
        passes=found.passes,
    )


def _seedings() -> Iterator[Place]:
    """The calls that set torch's generator to a state again and again: in a loop, or in a function called in a loop."""
    trees = [(file, tree, list(nodes_in(tree))) for file, tree in user_trees()]
    functions = [node for _, _, nodes in trees for node in nodes if isinstance(node, FUNCTIONS)]
    helpers = {function.name for function in functions if _only_seeds(function)}
    loops = [node for _, _, nodes in trees for node in nodes if isinstance(node, LOOPS)]
    repeated = {callee(call) for loop in loops for call in ast.walk(loop) if isinstance(call, ast.Call)} - helpers
    for file, _, nodes in trees:
        for around in nodes:
            if isinstance(around, LOOPS) or (isinstance(around, FUNCTIONS) and around.name in repeated):
                for node in ast.walk(around):
                    if isinstance(node, ast.Call) and (_sets_generator(node) or callee(node) in _SEEDING | helpers):
                        yield Place(file, node.lineno)


def _only_seeds(function: ast.AST) -> bool:
    """Whether all calls of a function have to do with seeds, torch's among them."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(map(_sets_generator, calls)) and all(
        "seed" in callee(call) or _SETTING in callee(call) for call in calls
    )


def _sets_generator(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr="manual_seed")):
            return ast.unparse(owner) in _TORCH
        case ast.Call(func=ast.Name(id="manual_seed")):
            return True
    return False
