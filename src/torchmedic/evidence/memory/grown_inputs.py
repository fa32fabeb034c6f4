"""What the failing call of the model was given, where the source makes it longer by itself at every turn of a loop.

For loops that neither load nor update, as when a text is generated: nobody has counted their turns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.attempts import callers_of
from torchmedic.evidence.memory.grown_tensors import joins
from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.evidence.memory.source.model_call import trained_call
from torchmedic.evidence.memory.source.run_again import is_run_again
from torchmedic.source.live_frames import Frame, syntax_tree


class Grown(NamedTuple):
    """A variable or attribute, the line that gives it to the model, and the statement that joins more to it."""

    name: str
    shape: tuple[int, ...]
    call: Filler
    at: Filler


def grown_input(evidence: RaisedEvidence, modules: Iterable[torch.nn.Module]) -> Grown | None:
    """The input of the model that grows by itself."""
    frame, call = _call(evidence)
    tree = syntax_tree(frame.file) if frame is not None else None
    if frame is None or call is None or tree is None:
        return None
    wanted = [ast.unparse(each) for each in call.args if isinstance(each, ast.Name | ast.Attribute)]
    for name in wanted:
        values = list(_values_of(name, tree))
        joined = [(node, value) for node, value in values if joins(value, name.rpartition(".")[2])]
        is_cut = any(_is_part_of(name, part) for _, value in values for part in ast.walk(value))
        if not joined or is_cut:
            continue
        filler = Filler(frame.file, joined[0][0], joined[0][1], True)
        shape = _shape(name, frame)
        if shape and is_run_again(filler, evidence.frames, modules):
            return Grown(name, shape, Filler(frame.file, call, None, True), filler)
    return None


def _call(evidence: RaisedEvidence) -> tuple[Frame | None, ast.Call | None]:
    """The call of the model that is under way; or the one that backward goes back to."""
    if any(frame.module is not None for frame in evidence.frames):
        callers = callers_of(evidence)
        frame = callers[-1] if callers and callers[-1].is_user else None
        return frame, frame.node if frame is not None and isinstance(frame.node, ast.Call) else None
    frame = evidence.user_frame
    return frame, trained_call(frame) if frame is not None else None


def _values_of(name: str, tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(_is(name, target) for target in node.targets):
            yield node, node.value


def _is(name: str, node: ast.expr) -> bool:
    """Whether an expression means the variable; an attribute has another object before it in its own class."""
    if isinstance(node, ast.Attribute) and "." in name:
        return node.attr == name.rpartition(".")[2]
    return ast.unparse(node) == name


def _is_part_of(name: str, node: ast.AST) -> bool:
    """`x[:, -100:]`, which keeps it short."""
    return isinstance(node, ast.Subscript) and _is(name, node.value)


def _shape(name: str, frame: Frame) -> tuple[int, ...]:
    first, *rest = name.split(".")
    value = frame.lookup(first)
    for attribute in rest:
        value = getattr(value, "__dict__", {}).get(attribute)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
