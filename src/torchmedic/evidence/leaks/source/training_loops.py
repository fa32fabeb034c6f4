"""The loops that train, found in the source: those that call backward, themselves or by way of functions.

What is collected between two trainings, to be trained on, grows by intention: a pool of labelled samples, the games of
a player, the stages of a curriculum. So it matters what a loop reads, and whether it is the one that fills.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchmedic.evidence.leaks.source.sites import Site, parameters_of
from torchmedic.observe.heap.walk import Held
from torchmedic.source.assignments import targets_of
from torchmedic.source.syntax import FUNCTIONS, LOOPS, callee, calls_in, last_name, runs_backward, syntax_tree

_DEFINITIONS = FUNCTIONS | ast.ClassDef
_MAX_CALL_DEPTH = 4  # from a loop to the function that reads


class _Loop(NamedTuple):
    file: str
    node: LOOPS


def training_loops(files: Iterable[str]) -> TrainingLoops:
    """The training loops of some files; known from the last time, unless one of the files has changed."""
    trees = [(file, tree) for file in dict.fromkeys(files) if (tree := syntax_tree(file)) is not None]
    return _of_trees(tuple(trees))


@functools.lru_cache(maxsize=4)
def _of_trees(trees: tuple[tuple[str, ast.Module], ...]) -> TrainingLoops:
    return TrainingLoops(dict(trees))


class TrainingLoops:
    """The loops of some files that run a backward, and what they read."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._trees = trees
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for tree in self._trees.values():
            for node in ast.walk(tree):
                if isinstance(node, FUNCTIONS):
                    self._functions.setdefault(node.name, []).append(node)

    def leads_to_backward(self, statements: Iterable[ast.AST], seen: frozenset[str] = frozenset()) -> bool:
        """Whether statements go backward, directly or in a function that they call, but in no loop of their own."""
        for call in _calls(statements):
            name = callee(call)
            if runs_backward(call):
                return True
            if name not in seen and any(
                self.leads_to_backward(each.body, seen | {name}) for each in self._functions.get(name, ())
            ):
                return True
        return False

    @functools.cached_property
    def _loops(self) -> list[_Loop]:
        return [
            _Loop(file, node)
            for file, tree in self._trees.items()
            for node in ast.walk(tree)
            if isinstance(node, LOOPS) and self.leads_to_backward(node.body)
        ]

    def read_what_others_fill(self, held: Held, put: Site) -> bool:
        """Whether a loop trains on what a holder has, which is filled outside of every such loop."""
        if any(self._is_filled_in(loop, put) for loop in self._loops):
            return False
        return any(held.last in self._names_read(loop) for loop in self._loops)

    def _is_filled_in(self, loop: _Loop, put: Site) -> bool:
        if any(node is loop.node for node in put.path):
            return True
        around = {getattr(node, "name", "") for node in put.path if isinstance(node, ast.FunctionDef)}
        return not around.isdisjoint(self._reached(loop.node))

    def _reached(self, loop: ast.AST) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
        """The functions that a loop calls, and those that these call, by name."""
        found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        pending: list[ast.AST] = [loop]
        for _ in range(_MAX_CALL_DEPTH):
            names = {callee(node) for tree in pending for node in calls_in(tree)}
            new = {name: self._functions[name] for name in names if name in self._functions and name not in found}
            found |= new
            pending = [each for functions in new.values() for each in functions]
        return found

    def _names_read(self, loop: _Loop) -> set[str]:
        """The names that a loop and the functions it calls read, and the names that their values are made from."""
        reached = [each for functions in self._reached(loop.node).values() for each in functions]
        found = {name for tree in (loop.node, *reached) for name in _names(tree)}
        assignments = _assignments(self._trees[loop.file])
        assignments += [
            given for tree in self._trees.values() for node in calls_in(tree) for given in self._arguments(node)
        ]
        return _closure(found, assignments) - {"self"}

    def _arguments(self, call: ast.Call) -> Iterator[tuple[set[str], set[str]]]:
        """The arguments of a function by their names inside of it, each with the names in what it is given."""
        for function in self._functions.get(callee(call), ()):
            names = parameters_of(function)
            yield from (({name}, _names(value)) for name, value in zip(names, call.args, strict=False))
            yield from (({each.arg or ""}, _names(each.value)) for each in call.keywords)


def _assignments(tree: ast.AST) -> list[tuple[set[str], set[str]]]:
    """The names on both sides of each assignment."""
    return [
        (set(_targets(node)), _names(node.value))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
    ]


def _closure(names: set[str], assignments: list[tuple[set[str], set[str]]]) -> set[str]:
    """Names, and all names that their values are made from."""
    found, size = set(names), -1
    while len(found) > size:
        size = len(found)
        for targets, others in assignments:
            if not targets.isdisjoint(found):
                found |= others
    return found


def _calls(statements: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """The calls in statements, but for those in loops and functions that stand in there."""
    pending = list(statements)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, LOOPS | _DEFINITIONS):
            pending.extend(ast.iter_child_nodes(node))


def _names(tree: ast.AST) -> set[str]:
    loaded = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return {last_name(node) for node in loaded if isinstance(node.ctx, ast.Load)}


def _targets(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    for target in targets_of(node):
        for part in ast.walk(target):
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                yield last_name(part)
