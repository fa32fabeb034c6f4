"""Inputs and labels that nothing connects: all inputs are equal, or each input has the label of another item."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from torchmedic.detect.loop.incident import IdenticalInputs, LabelsOfOtherItems, LoopIncident
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, calls_in, function_of, has_line, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import user_trees

_MIN_BATCHES = 6
_MIN_ROWS = 48
_MIN_TABLES = 3  # of pairs
_MAX_COMPARED = 64  # items of a dataset
_CONSTANTS = {  # by function: the value of all elements; None for any
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0.0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0),
    **dict.fromkeys(("full", "full_like", "new_full")),
}


def find(habits: Habits) -> Iterator[LoopIncident]:
    rounds = _rounds(habits.events)
    for batches, finder in ((1, _identical), (1, _of_one_class), (2, _apart)):
        alike = [(fetches, is_target) for fetches, is_target in rounds if len(fetches) == batches]
        if any(is_target for _, is_target in alike):
            yield from finder(habits, [fetches for fetches, _ in alike])
    yield from _wrong_pairs(habits)


def _wrong_pairs(habits: Habits) -> Iterator[LoopIncident]:
    """The rows of a table of all pairs have labels that name no pair."""
    tables = habits.pair_tables[:_MIN_TABLES]
    if len(tables) < _MIN_TABLES or not habits.steps:
        return
    known = [table for table, _ in tables if table is not None]
    if len(known) < _MIN_TABLES:
        return
    is_itself = all(bool(table.is_itself) for table in known)
    if is_itself or all(bool(table.is_one_column) for table in known):
        backward = tables[-1][1]
        yield LabelsOfOtherItems(
            step=habits.steps,
            cause=_labels_of_pairs("arange" if is_itself else "zeros ones full zeros_like", backward),
            batches=len(known),
            length=0,
            other=backward,
            pairs=known[-1].rows,
            is_itself=is_itself,
        )


def _labels_of_pairs(makers: str, backward: Place) -> Place:
    """The only line that makes labels, or else the only one that calls a loss over classes; else a backward."""
    for names in (makers.split(), ("cross_entropy", "CrossEntropyLoss")):
        lines = {
            (file, statement.lineno)
            for file, tree in user_trees()
            for statement in nodes_in(tree)
            if isinstance(statement, ast.Assign | ast.Return | ast.Expr)
            if any(names[0] == "cross_entropy" or _makes_integers(call) for call in calls_in(statement, *names))
        }
        if len(lines) == 1:
            return Place(*lines.pop())
    return backward


def _makes_integers(call: ast.Call) -> bool:
    """Whether a call of a function that fills a tensor makes whole numbers, or those of `arange`."""
    kinds = {part.attr for word in call.keywords for part in ast.walk(word.value) if isinstance(part, ast.Attribute)}
    return callee(call) == "arange" or not kinds.isdisjoint(("long", "int64"))


def _rounds(events: list[Event]) -> list[tuple[list[Event], bool]]:
    """The batches that were fetched before each call of backward, and whether its loss compares with their labels.

    Pairs of batches that several calls of backward use are left out: a network may be given the labels, as a generator.
    """
    fetches: list[Event] = []
    found: list[tuple[list[Event], bool]] = []
    for event in events:
        if event.kind == "fetch":
            fetches.append(event)
        elif event.kind == "backward" and fetches:
            labels = frozenset[int]().union(*(each.fact.look.labels for each in fetches))
            found.append((fetches, bool(labels) and labels <= event.fact.targets))
            fetches = []
        elif event.kind == "backward" and found and len(found[-1][0]) > 1:
            found[-1] = ([], False)
        elif event.kind in ("gap", "eval"):
            fetches = []
    return found


def _identical(habits: Habits, rounds: list[list[Event]]) -> Iterator[LoopIncident]:
    fetches = [fetch for (fetch,) in rounds]
    rows = sum(event.fact.look.rows for event in fetches)
    looks = {event.fact.look.equal for event in fetches}
    if len(fetches) < _MIN_BATCHES or rows < _MIN_ROWS or 0 in looks:
        return
    last = fetches[-1]
    dataset = habits.thing(last.fact.dataset)
    if dataset is None:
        return
    if len(looks) > 1:
        yield from _overwritten(fetches, dataset, rows)
        return
    if _is_meant(last.fact.look.value):
        return
    is_one_item = not any(event.fact.look.labels_differ for event in fetches)
    while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset") and not is_one_item:
        dataset = dataset.dataset
    name, place = _taken_from(dataset) if is_one_item else _source(dataset)
    if place is None if is_one_item else not (name or _is_fair(fetches)):
        return
    yield IdenticalInputs(
        step=last.step,
        cause=place or last.place,
        data=last.place,
        name=name,
        rows=rows,
        batches=len(fetches),
        is_one_item=is_one_item,
    )


def _overwritten(fetches: list[Event], dataset: Any, rows: int) -> Iterator[LoopIncident]:
    """The rows of each batch are equal: the dataset gives one tensor for all items, and writes to it for the next."""
    is_random = any(event.fact.drawn for event in fetches)
    getter = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if not is_random or getter is None or not all(event.fact.look.labels_differ for event in fetches):
        return
    tree = syntax_tree(getter.co_filename) if is_user_file(getter.co_filename) else None
    returns = [node for node in nodes_in(function_of(tree, getter)) if isinstance(node, ast.Return)]
    if not returns:
        return
    taken = {id(node.value) for node in nodes_in(returns[-1]) if isinstance(node, ast.Subscript)}
    read = [node for node in nodes_in(returns[-1]) if isinstance(node, ast.Attribute) and id(node) not in taken]
    shared = [node.attr for node in read if type(vars(dataset).get(node.attr)).__name__ in ("Tensor", "ndarray")]
    yield IdenticalInputs(
        step=fetches[-1].step,
        cause=Place(getter.co_filename, returns[-1].lineno),
        data=fetches[-1].place,
        name=shared[0] if shared else "",
        rows=rows,
        batches=len(fetches),
        is_overwritten=True,
    )


def _of_one_class(habits: Habits, rounds: list[list[Event]]) -> Iterator[LoopIncident]:
    """A whole pass over the only dataset that is trained on has shown one label.

    A dataset that takes its items from another one, or is given its tensors, may be a part that was chosen by class.
    """
    fetches = [fetch for (fetch,) in rounds]
    classes = {event.fact.look.alike for event in fetches}
    rows = sum(event.fact.look.rows for event in fetches)
    if len(fetches) < _MIN_BATCHES or rows < _MIN_ROWS or len(classes) > 1 or None in classes:
        return
    length = next((event.fact.length for event in fetches if event.fact.length), None)
    datasets = {event.fact.dataset for event in fetches}
    if length is None or len(datasets) > 1 or not any(event.fact.position >= length for event in fetches):
        return
    label, last = classes.pop(), fetches[-1]
    dataset = habits.thing(last.fact.dataset)
    parts = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    is_part = type(dataset).__module__.startswith("torch.") or any(isinstance(part, Dataset) for part in parts)
    if dataset is None or label is None or is_part or _is_meant(float(label)):
        return
    name, place = _label_source(dataset)
    yield IdenticalInputs(
        step=last.step,
        cause=place or last.place,
        data=last.place,
        name=name,
        rows=rows,
        batches=len(fetches),
        label=label,
    )


def _label_source(dataset: Any) -> tuple[str, Place | None]:
    """The attribute of a dataset with one label for all items and the line that sets it; else where a label is made."""
    name, place = _source(dataset)
    getter = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if name or place is None or getter is None:
        return name, place
    function = function_of(syntax_tree(getter.co_filename), getter)
    returned = [node.value for node in nodes_in(function) if isinstance(node, ast.Return)]
    last = [value.elts[-1] for value in returned if isinstance(value, ast.Tuple) and value.elts]
    names = {part.id for value in last for part in ast.walk(value) if isinstance(part, ast.Name)}
    sets = [node for node in nodes_in(function) if isinstance(node, ast.Assign)]
    labels = [node for node in sets if isinstance(node.targets[0], ast.Name) and node.targets[0].id in names]
    return "", Place(getter.co_filename, labels[-1].lineno) if labels else place


def _is_fair(fetches: list[Event]) -> bool:
    """Whether batches stand for all items: they were drawn at random, or are a whole pass over the data.

    The first items of a dataset may be equal, as the empty pictures of a class that is stored first.
    """
    length = next((event.fact.length for event in fetches if event.fact.length), None)
    is_whole = length is not None and any(event.fact.position >= length for event in fetches)
    return is_whole or any(event.fact.drawn for event in fetches)


def _is_meant(value: float | None) -> bool:
    """Whether the script makes tensors of this one value and never fills them, as the input of a baseline."""
    for _, tree in user_trees() if value is not None else ():
        filled = {
            ast.unparse(target.value)
            for node in nodes_in(tree)
            for target in (node.targets if isinstance(node, ast.Assign) else [])
            if isinstance(target, ast.Subscript)
        }
        handlers = [node for node in nodes_in(tree) if isinstance(node, ast.ExceptHandler)]
        caught = {call for handler in handlers for call in calls_in(handler)}
        for call in calls_in(tree, *_CONSTANTS):
            if _CONSTANTS[callee(call)] not in (None, value) or call in caught:
                continue
            names = [
                ast.unparse(node.targets[0])
                for node in nodes_in(tree)
                if isinstance(node, ast.Assign) and has_line(node, call.lineno)
            ]
            if not set(names) & filled:
                return True
    return False


def _source(dataset: Any) -> tuple[str, Place | None]:
    """The attribute of a dataset with one value for all items, and the line that sets it; else the getter."""
    getter = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if getter is None or not is_user_file(getter.co_filename):
        return "", None
    function = function_of(syntax_tree(getter.co_filename), getter)
    read = [node.attr for node in nodes_in(function) if isinstance(node, ast.Attribute)]
    for name in read:
        if _is_same_for_all(vars(dataset).get(name), len(dataset)):
            sets = [
                node
                for node in nodes_in(syntax_tree(getter.co_filename))
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{name}"
                if not (isinstance(node.value, ast.Constant) or ast.unparse(node.value) in ("[]", "list()"))
            ]
            if len(sets) == 1:
                return name, Place(getter.co_filename, sets[0].lineno)
    returns = [node for node in nodes_in(function) if isinstance(node, ast.Return)]
    return "", Place(getter.co_filename, returns[-1].lineno if returns else getter.co_firstlineno)


def _taken_from(dataset: Any) -> tuple[str, Place | None]:
    """The table of a dataset that has a different entry for each item, and the line that takes the same one always."""
    getter = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if getter is None or not is_user_file(getter.co_filename):
        return "", None
    function = function_of(syntax_tree(getter.co_filename), getter)
    variables = {node.id for node in nodes_in(function) if isinstance(node, ast.Name)} - {"self"}
    for node in nodes_in(function):
        match node:
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=name), slice=index):
                values = vars(dataset).get(name)
                if any(isinstance(part, ast.Name) and part.id in variables for part in ast.walk(index)):
                    continue  # perhaps the index that the getter was given, or one that is made of it
                if _is_table(values, len(dataset)) and not _is_same_for_all(values, len(dataset)):
                    return name, Place(getter.co_filename, node.lineno)
    return "", None


def _is_table(values: Any, length: int) -> bool:
    is_table = isinstance(values, list | tuple | torch.Tensor) or type(values).__name__ == "ndarray"
    return is_table and len(values) == length > 1


def _is_same_for_all(values: Any, length: int) -> bool:
    """Whether a table of all items holds the same for each."""
    if not _is_table(values, length):
        return False
    some = [getattr(value, "tolist", lambda kept=value: kept)() for value in values[:: max(1, length // _MAX_COMPARED)]]
    return all(isinstance(one, int | float | str | list) for one in some) and all(one == some[0] for one in some)


def _apart(_: Habits, rounds: list[list[Event]]) -> Iterator[LoopIncident]:
    """One loader gives inputs, another one of the same length gives labels, and never those of the same items."""
    if len(rounds) < _MIN_BATCHES:
        return
    kinds = {frozenset((event.fact.look.holds, event.fact.dataset) for event in pair) for pair in rounds}
    if len(kinds) != 1 or {holds for holds, _ in kinds.pop()} != {"labels", "inputs"}:
        return
    facts = [[event.fact for event in pair] for pair in rounds]
    if any(None in (a.items, b.items) or a.items == b.items or a.position != b.position for a, b in facts):
        return
    if any(a.look.rows != b.look.rows for a, b in facts):
        return
    lengths = {fact.length for pair in facts for fact in pair if fact.position == 1}
    if len(lengths) != 1 or None in lengths:
        return
    last = rounds[-1][-1]
    yield LabelsOfOtherItems(step=last.step, cause=last.place, batches=len(rounds), length=lengths.pop())
