"""Inputs and labels that the script puts into two different random orders before it pairs them.

The source shows it: two statements of one block each draw an order of their own (`x = x[torch.randperm(n)]`,
`np.random.shuffle(x)`) for two variables, and a later expression of the block takes both, or a data set keeps both and
gives them as one item. The values show that one of them holds labels: data of two domains is shuffled apart on purpose.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Subset

from torchmedic.detect.loop.incident import LabelsOfOtherItems, LoopIncident
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.live_frames import stack_of
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, calls_in, nodes_in
from torchmedic.source.user_variables import user_trees

_ORDERS = frozenset({"randperm", "permutation"})
_MIN_STEPS = 6
_MIN_ITEMS = 16


def find(habits: Habits) -> Iterator[LoopIncident]:
    steps = [event for event in habits.events if event.kind == "step"]
    if len(steps) < _MIN_STEPS:
        return
    datasets = _datasets(habits)
    for file, tree in user_trees():
        for block in _blocks(tree):
            for first, second, names in _shuffles(block):
                is_taken = any(_takes(one, *names) for one in block[block.index(second) + 1 :])
                if (is_taken and _are_inputs_and_labels(*names)) or any(
                    _are_kept(each, tree, block, names) for each in datasets
                ):
                    yield LabelsOfOtherItems(
                        step=steps[-1].step,
                        cause=Place(file, second.lineno),
                        batches=len(steps),
                        length=0,
                        other=Place(file, first.lineno),
                        names=names,
                    )
                    return


def _blocks(tree: ast.AST | None) -> Iterator[Sequence[ast.stmt]]:
    """The bodies of a file, of its functions and of its loops."""
    for node in nodes_in(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.For | ast.While | ast.With | ast.If):
            yield node.body


def _shuffles(block: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt, tuple[str, str]]]:
    """Two statements of a block that shuffle two variables apart."""
    found = [(at, name) for at, statement in enumerate(block) if (name := _shuffled(statement))]
    for (at, name), (then, other) in itertools.pairwise(found):
        between = block[at + 1 : then]
        is_seeded = any(
            "seed" in callee(call) or "set_state" in callee(call) for one in between for call in calls_in(one)
        )
        if name != other and not is_seeded:
            yield block[at], block[then], (name, other)


def _shuffled(statement: ast.stmt) -> str:
    """The variable that a statement puts into an order that it draws itself; empty if it does not."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)], value=ast.Subscript(value=ast.Name(id=same), slice=ast.Call() as order)
        ):
            return name if name == same and callee(order) in _ORDERS else ""
        case ast.Expr(value=ast.Call(args=[ast.Name(id=name)]) as call) if callee(call) == "shuffle":
            return name
    return ""


def _takes(statement: ast.stmt, *names: str) -> bool:
    """Whether one call, or one tuple, takes both variables, or parts of them."""
    for node in nodes_in(statement):
        parts = [*node.args] if isinstance(node, ast.Call) else [*node.elts] if isinstance(node, ast.Tuple) else []
        held = [part.value if isinstance(part, ast.Subscript) else part for part in parts]
        if {part.id for part in held if isinstance(part, ast.Name)}.issuperset(names):
            return True
    return False


def _are_inputs_and_labels(name: str, other: str) -> bool:
    """Whether live variables of these names have as many rows, and one of them holds a label or a number per row."""
    for frame in reversed(stack_of(sys._getframe())):
        space = {**frame.live.f_globals, **frame.variables}
        if frame.is_user and name in space and other in space:
            return _fit(space[name], space[other])
    return False


def _datasets(habits: Habits) -> list[Any]:
    """The data sets that batches were fetched from; a subset stands for the whole."""
    found = {}
    for number in {event.who for event in habits.events if event.kind == "fetch"}:
        dataset = habits.thing(number)
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        found[id(dataset)] = dataset
    return list(found.values())


def _are_kept(dataset: Any, tree: ast.AST, block: Sequence[ast.stmt], names: tuple[str, str]) -> bool:
    """Whether a block of a data set's class keeps the variables as inputs and labels, and an item has one of each."""
    for node in nodes_in(tree):
        if not isinstance(node, ast.ClassDef) or node.name != type(dataset).__name__ or block[0] not in ast.walk(node):
            continue
        first, second = (_attributes_of(name, other, block) for name, other in (names, names[::-1]))
        values = getattr(dataset, "__dict__", {})  # none with `__slots__`
        return any(
            _fit(values.get(one), values.get(another)) and _gives_both(node, one, another)
            for one in first
            for another in second
        )
    return False


def _attributes_of(name: str, other: str, block: Sequence[ast.stmt]) -> list[str]:
    """The attributes that statements of a block make of one variable and not of the other."""
    found = []
    for statement in block:
        match statement:
            case ast.Assign(targets=[ast.Attribute(attr=attr)], value=value):
                read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
                found += [attr] if name in read and other not in read else []
    return found


def _gives_both(node: ast.ClassDef, one: str, another: str) -> bool:
    """Whether a class takes both attributes at the same index."""
    indexed: dict[str, set[str]] = {one: set(), another: set()}
    for part in ast.walk(node):
        match part:
            case ast.Subscript(value=ast.Attribute(attr=attr), slice=ast.Name(id=index)) if attr in indexed:
                indexed[attr].add(index)
    return not indexed[one].isdisjoint(indexed[another])


def _fit(one: Any, other: Any) -> bool:
    shapes = [_shape(one), _shape(other)]
    if not all(shapes) or shapes[0][0] != shapes[1][0] or shapes[0][0] < _MIN_ITEMS:
        return False
    sizes = sorted(torch.Size(shape[1:]).numel() for shape in shapes)
    return sizes[0] == 1 < sizes[1]


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of an array; a list has one value per row unless its items are long themselves."""
    if isinstance(value, list):
        is_long = bool(value) and (isinstance(value[0], str | list | tuple) or bool(getattr(value[0], "shape", ())))
        return (len(value), 2 if is_long else 1)
    is_array = isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray"
    return tuple(value.shape) if is_array else ()
