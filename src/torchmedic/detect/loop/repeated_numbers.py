"""Passes over the data with the same random numbers, and the line that sets the generator back for each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from torchmedic.detect.loop.incident import LoopIncident, RandomNumbersRepeat
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, LOOPS, callee, nodes_in
from torchmedic.source.user_variables import user_trees

_SEEDING = frozenset("seed_everything set_seed".split())  # of libraries
_TORCH = frozenset("torch torch.random".split())
_SETTING = "deterministic"
_CALLED_ONCE = frozenset("__init__ __post_init__".split())


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
    """The calls that set torch's generator to a state again and again.

    They stand in a loop, or in a function that is called in a loop; else in one that only a library calls: a callback.
    """
    trees = [(file, list(nodes_in(tree))) for file, tree in user_trees()]
    functions = [node for _, nodes in trees for node in nodes if isinstance(node, FUNCTIONS)]
    helpers = {function.name for function in functions if _only_seeds(function)}
    calls = [node for _, nodes in trees for node in nodes if isinstance(node, ast.Call)]
    loops = [node for _, nodes in trees for node in nodes if isinstance(node, LOOPS)]
    repeated = {callee(call) for loop in loops for call in ast.walk(loop) if isinstance(call, ast.Call)} - helpers
    foreign = {function.name for function in functions} - {callee(call) for call in calls} - _CALLED_ONCE
    yield from list(_calls_in(trees, helpers, repeated, in_loops=True)) or _calls_in(trees, helpers, foreign)


def _calls_in(
    trees: Iterable[tuple[str, list[ast.AST]]], helpers: set[str], names: set[str], *, in_loops: bool = False
) -> Iterator[Place]:
    """The calls that set the generator, or of helpers that do, in functions with these names, and in loops."""
    for file, nodes in trees:
        for around in nodes:
            if (in_loops and isinstance(around, LOOPS)) or (isinstance(around, FUNCTIONS) and around.name in names):
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
