"""Inputs and labels that nothing connects: all inputs are equal, or each input has the label of another item."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.detect.loop.incident import IdenticalInputs, LabelsOfOtherItems, LoopIncident
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import function_of, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file

_MIN_BATCHES = 6
_MIN_ROWS = 48
_MAX_COMPARED = 64  # items of a dataset


def find(habits: Habits) -> Iterator[LoopIncident]:
    rounds = list(_rounds(habits.events))
    yield from _identical(habits, [fetches[0] for fetches in rounds if len(fetches) == 1])
    yield from _apart([fetches for fetches in rounds if len(fetches) == 2])


def _rounds(events: list[Event]) -> Iterator[list[Event]]:
    """The batches that were fetched before each call of backward."""
    fetches: list[Event] = []
    for event in events:
        if event.kind == "fetch":
            fetches.append(event)
        elif event.kind == "backward" and fetches:
            yield fetches
            fetches = []
        elif event.kind in ("gap", "eval"):
            fetches = []


def _identical(habits: Habits, fetches: list[Event]) -> Iterator[LoopIncident]:
    rows = sum(event.fact.look.rows for event in fetches)
    looks = {event.fact.look.equal for event in fetches}
    if len(fetches) < _MIN_BATCHES or rows < _MIN_ROWS or len(looks) != 1 or 0 in looks:
        return
    if not any(event.fact.look.labels_differ for event in fetches):
        return
    last = fetches[-1]
    dataset = habits.thing(last.fact.dataset)
    if dataset is None:
        return
    while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    name, place = _source(dataset)
    yield IdenticalInputs(
        step=last.step,
        cause=place or last.place,
        data=last.place,
        name=name,
        rows=rows,
        batches=len(fetches),
    )


def _source(dataset: Any) -> tuple[str, Place | None]:
    """The attribute of a dataset that holds the same for all items, with the line that sets it; else its getter."""
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


def _is_same_for_all(values: Any, length: int) -> bool:
    """Whether a table of all items holds the same for each."""
    is_table = isinstance(values, list | tuple | torch.Tensor) or type(values).__name__ == "ndarray"
    if not is_table or len(values) != length:
        return False
    some = [getattr(value, "tolist", lambda kept=value: kept)() for value in values[:: max(1, length // _MAX_COMPARED)]]
    return all(isinstance(one, int | float | str | list) for one in some) and all(one == some[0] for one in some)


def _apart(rounds: list[list[Event]]) -> Iterator[LoopIncident]:
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
