"""Writes in place that the source shows: layers built with `inplace=True`, and statements."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from torchmedic.diagnose.cures.edits import written_by
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.layer_construction import built_at
from torchmedic.source.lookup.safe_eval import UNKNOWN, read
from torchmedic.source.syntax import calls_in, nodes_in
from torchmedic.source.user_variables import user_trees

_SHAPE = re.compile(r"\[torch\.[\w.]+ \[([\d, ]*)\]\]")


def built_inplace(frames: list[Frame], module: torch.nn.Module | None) -> Location | None:
    """The call that built a layer with `inplace=True`: the only one of its kind, or the one that its owner names."""
    if module is None:
        return None
    kind = type(module).__name__
    found = [
        (file, node)
        for file, tree in user_trees()
        for node in calls_in(tree)
        if ast.unparse(node.func).rpartition(".")[2] == kind and _is_flagged(node)
    ]
    if len(found) == 1:
        return node_location("origin", *found[0])
    built = built_at(frames, module, "")
    return built if built is not None and "inplace" in built.code else None


def _is_flagged(call: ast.Call) -> bool:
    values = [*call.args, *(word.value for word in call.keywords if word.arg == "inplace")]
    return any(isinstance(value, ast.Constant) and value.value is True for value in values)


def in_place_statements(evidence: RaisedEvidence) -> list[tuple[str, ast.stmt]]:
    """The statements of the files on the stack that write in place; those of another shape are left out."""
    shape = _SHAPE.search(evidence.message)
    wanted = tuple(int(size) for size in re.findall(r"\d+", shape[1])) if shape else None
    found = []
    for frame in {frame.file: frame for frame in evidence.frames if frame.is_user}.values():
        for statement in nodes_in(frame.tree):
            target = _target(statement)
            if target is None:
                continue
            value = _value(target, evidence)
            if value is UNKNOWN or (isinstance(value, torch.Tensor) and (wanted is None or _fits(value, wanted))):
                assert isinstance(statement, ast.stmt)
                found.append((frame.file, statement))
    return found


def _fits(value: torch.Tensor, wanted: tuple[int, ...]) -> bool:
    return tuple(value.shape) == wanted or value.numel() == torch.Size(wanted).numel()


def _target(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.AugAssign(target=ast.Name() | ast.Attribute() as target):
            return target
        case ast.AugAssign(target=ast.Subscript(value=target)) | ast.Assign(targets=[ast.Subscript(value=target)]):
            return target
        case ast.Expr(value=ast.Call() as call):
            return written_by(call)
    return None


def _value(target: ast.expr, evidence: RaisedEvidence) -> Any:
    """The present value of the target, read in the innermost frame that knows it."""
    for frame in reversed(evidence.frames):
        if frame.is_user:
            value = read(target, frame)
            if value is not UNKNOWN:
                return value
    return UNKNOWN
