"""Writes in place: who saved a tensor and who wrote to it in a replay, and writes that only the source shows.

The source shows layers built with `inplace=True`, and statements. In a replay, hooks on saved tensors switch off
autograd's own check of versions, so the hooks check versions themselves.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.diagnose.cures.edits import written_by
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.replay.trace.microscope import Microscope, Op, Spot, storage_of
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.layer_construction import built_at
from torchmedic.source.lookup.safe_eval import UNKNOWN, read
from torchmedic.source.spots import user_spots
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


class Saved(NamedTuple):
    """A tensor as it was when an operation saved it."""

    after: int  # how many operations had run by then
    spot: Spot | None
    storage: int | None
    version: int
    shape: tuple[int, ...]
    tensor: torch.Tensor


class Overwritten(RuntimeError):
    """Backward needs a saved tensor that is no longer what it was."""

    def __init__(self, saved: Saved, node: str) -> None:
        super().__init__("a saved tensor was modified in place")
        self.saved = saved
        self.node = node


@contextlib.contextmanager
def watch_saved_tensors(scope: Microscope) -> Iterator[None]:
    """Raise `Overwritten` where autograd would complain of a version, with the saver at hand."""

    def pack(tensor: torch.Tensor) -> Saved:
        # The stack is that of the call which is being recorded; the last operation may be an older one.
        spots = user_spots(sys._getframe(1))
        spot = spots[0] if spots else None
        return Saved(len(scope.ops), spot, storage_of(tensor), tensor._version, tuple(tensor.shape), tensor)

    def unpack(saved: Saved) -> torch.Tensor:
        if saved.tensor._version != saved.version:
            node: Any = torch._C._current_autograd_node()
            raise Overwritten(saved, node.name() if node is not None else "")
        return saved.tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def writers(scope: Microscope, saved: Saved) -> list[Op]:
    """The operations that wrote to a saved tensor's memory after it was saved, in order.

    An operation saves its inputs before it runs and its results after that, so one that writes to what it saves as an
    input counts.
    """
    return [op for op in scope.ops[saved.after :] if saved.storage is not None and saved.storage in op.written]
