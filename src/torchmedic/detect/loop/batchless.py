"""Loops over the data that get no batches: a loader that gives none, or an iterator that one pass uses up."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmedic.detect.loop.incident import LoopIncident, LoopWithoutBatches
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import (
    FUNCTIONS,
    callee,
    calls_in,
    function_of,
    has_line,
    innermost,
    nodes_in,
    own_nodes,
    syntax_tree,
)
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import locals_of

_WRAPPERS = ("enumerate", "tqdm")
_ENDLESS = ("cycle", "count", "repeat", "iter")
_OF_CONTAINERS = frozenset("list_iterator tuple_iterator range_iterator dict_keyiterator dict_valueiterator".split())
_MAX_DEPTH = 6  # of iterators in iterators


class _Loop(NamedTuple):
    """A loop that is under way."""

    file: str
    node: ast.For
    variables: dict[str, Any]
    line: int  # that runs now


def find(habits: Habits) -> Iterator[LoopIncident]:
    if habits.steps:
        yield from _used_up(habits)
    elif habits.empty is not None and habits.is_ending and not any(each.kind == "backward" for each in habits.events):
        place, items, size = habits.empty
        if not items and any(watched.loaded is not None for watched in habits.optimizers.values()):
            return  # a run that was resumed, and of whose data nothing may be left
        yield LoopWithoutBatches(step=0, cause=place, name="", items=items, size=size)


def _used_up(habits: Habits) -> Iterator[LoopIncident]:
    """An iterator is made before a loop over epochs, and the loop inside of it takes all that there is."""
    loops = list(_loops(sys._getframe()))  # innermost first
    for at, inner in enumerate(loops):
        value = _value(_bare(inner.node.iter), inner.variables)
        if value is None or not _ends(value, _MAX_DEPTH) or _is_left(inner.node):
            continue
        for outer in loops[at + 1 :]:
            turns = _turns(outer)
            names = [name for name, held in outer.variables.items() if held is value]
            is_wanted = len(names) == 1 and not _is_set(outer.node, names[0]) and not _is_for_some_turns(outer, inner)
            if turns > 1 and is_wanted:
                yield LoopWithoutBatches(
                    step=habits.steps,
                    cause=_assigned(outer, names[0]) or Place(inner.file, inner.node.lineno),
                    loop=Place(inner.file, inner.node.lineno),
                    name=names[0],
                    kind=type(value).__name__.strip("_"),
                    turns=turns,
                )
                return


def _loops(frame: FrameType | None) -> Iterator[_Loop]:
    """The `for` loops of the user's that are under way, innermost first."""
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if is_user_file(file):
            tree = syntax_tree(file)
            around = function_of(tree, frame.f_code) or tree
            found = [each for each in _own_loops(around) if each.lineno < line <= (each.end_lineno or 0)]
            variables = dict(locals_of(frame))
            yield from (_Loop(file, each, variables, line) for each in sorted(found, key=lambda each: -each.lineno))
        frame = frame.f_back


def _own_loops(around: ast.AST | None) -> list[ast.For]:
    inside = [node for node in nodes_in(around) if isinstance(node, FUNCTIONS) and node is not around]
    loops = [node for node in nodes_in(around) if isinstance(node, ast.For)]
    return [loop for loop in loops if not any(has_line(function, loop.lineno) for function in inside)]


def _bare(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and callee(node) in _WRAPPERS and node.args:
        node = node.args[0]
    return node


def _value(node: ast.expr, variables: dict[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return variables.get(name)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return getattr(variables.get(name), "__dict__", {}).get(attribute)
        case ast.Constant(value=value):
            return value
    return None


def _turns(loop: _Loop) -> int:
    """How often a loop over a range goes round; 0 where that is not known."""
    node = _bare(loop.node.iter)
    if not isinstance(node, ast.Call) or callee(node) not in ("range", "trange"):
        return 0
    bounds = [_value(each, loop.variables) for each in node.args]
    return len(range(*bounds)) if bounds and all(type(each) is int for each in bounds) else 0


def _ends(value: Any, depth: int) -> bool:
    """Whether this is an iterator that ends, and that stays at its end."""
    if depth == 0:
        return False
    if type(value) in (zip, map, filter, enumerate):
        parts = [part for part in value.__reduce__()[1] if hasattr(part, "__next__")]
        return any(_ends(part, depth - 1) for part in parts)
    if isinstance(value, GeneratorType):
        made = function_of(syntax_tree(value.gi_code.co_filename), value.gi_code)
        if made is None:
            inner = value.gi_frame.f_locals.get(".0") if value.gi_frame is not None else None
            return inner is not None and _ends(inner, depth - 1)
        is_endless = any(isinstance(node, ast.While) for node in ast.walk(made)) or any(calls_in(made, *_ENDLESS))
        return is_user_file(value.gi_code.co_filename) and not is_endless
    if isinstance(value, _BaseDataLoaderIter):
        sampler = value._index_sampler
        return type(sampler) is BatchSampler and type(sampler.sampler) in (RandomSampler, SequentialSampler)
    return type(value).__name__ in _OF_CONTAINERS


def _is_left(loop: ast.For) -> bool:
    """Whether a loop may be left before its end."""
    return any(isinstance(node, ast.Break | ast.Return | ast.Raise | ast.Yield) for node in ast.walk(loop))


def _is_set(loop: ast.For, name: str) -> bool:
    """Whether a name gets another value inside of a loop."""
    named = (node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == name)
    return any(not isinstance(node.ctx, ast.Load) for node in named)


def _is_for_some_turns(outer: _Loop, inner: _Loop) -> bool:
    """Whether a condition that changes with the turns of the outer loop leads to the inner one, as a phase does."""
    is_inside = outer.file == inner.file and has_line(outer.node, inner.node.lineno)
    line = inner.node.lineno if is_inside else outer.line
    changing = {
        part.id for part in ast.walk(outer.node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    for node in ast.walk(outer.node):
        if isinstance(node, ast.If) and changing & {
            part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)
        }:
            is_left_out = any(isinstance(part, ast.Continue) for part in node.body) and node.lineno < line
            if has_line(node, line) or is_left_out:
                return True
    called = None if is_inside else innermost(syntax_tree(inner.file), inner.node.lineno, FUNCTIONS)
    parts = own_nodes(called) if called is not None else ()
    return any(isinstance(node, ast.If) and has_line(node, inner.node.lineno) for node in parts)


def _assigned(loop: _Loop, name: str) -> Place | None:
    """The only line that gives a name its value."""
    lines = {
        node.lineno
        for node in nodes_in(syntax_tree(loop.file))
        if isinstance(node, ast.Assign)
        for target in node.targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name) and part.id == name
    }
    return Place(loop.file, lines.pop()) if len(lines) == 1 else None
