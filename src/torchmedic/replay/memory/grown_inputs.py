"""What the failing call of the model was given, where the source makes it longer by itself at every turn of a loop.

For loops that neither load nor update, as when a text is generated: nobody has counted their turns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import Frame, syntax_tree
from torchmedic.replay.memory.attempts import callers_of
from torchmedic.replay.memory.fillers import Filler
from torchmedic.replay.memory.run_again import is_run_again

_JOINS = frozenset("cat concat concatenate hstack vstack".split())


class Grown(NamedTuple):
    """A variable or attribute, and the statement that joins more to it."""

    name: str
    shape: tuple[int, ...]
    call: Frame
    at: Filler


def grown_input(evidence: RaisedEvidence, modules: Iterable[torch.nn.Module]) -> Grown | None:
    callers = callers_of(evidence)
    frame = callers[-1] if callers and callers[-1].is_user and len(callers) < len(evidence.frames) else None
    call = frame.node if frame is not None else None
    if frame is None or not isinstance(call, ast.Call) or (tree := syntax_tree(frame.file)) is None:
        return None
    wanted = [ast.unparse(each) for each in call.args if isinstance(each, ast.Name | ast.Attribute)]
    for name in wanted:
        values = list(_values_of(name, tree))
        joined = [(node, value) for node, value in values if _joins(name, value)]
        is_cut = any(_is_part_of(name, part) for _, value in values for part in ast.walk(value))
        if not joined or is_cut:
            continue
        filler = Filler(frame.file, joined[0][0], joined[0][1], True)
        shape = _shape(name, frame)
        if shape and is_run_again(filler, evidence.frames, modules):
            return Grown(name, shape, frame, filler)
    return None


def _values_of(name: str, tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
            yield node, node.value


def _joins(name: str, value: ast.expr) -> bool:
    """`torch.cat([x, more], 1)`"""
    if not isinstance(value, ast.Call) or not value.args or not isinstance(value.args[0], ast.List | ast.Tuple):
        return False
    called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return called in _JOINS and any(ast.unparse(each) == name for each in value.args[0].elts)


def _is_part_of(name: str, node: ast.AST) -> bool:
    """`x[:, -100:]`, which keeps it short."""
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == name


def _shape(name: str, frame: Frame) -> tuple[int, ...]:
    first, *rest = name.split(".")
    value = frame.lookup(first)
    for attribute in rest:
        value = getattr(value, "__dict__", {}).get(attribute)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
