"""The two sides of a difference in the user's code, at the moment when its node is made.

A prediction that is subtracted from a target of another shape gives a table of all pairs. The node of the difference
knows the prediction only: a target has no node. So the sides are read from the source, in the live frame.
"""

from __future__ import annotations

import ast
import dis
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.safe_eval import read


class Operand(NamedTuple):
    """What stood on one side of a minus sign."""

    shape: tuple[int, ...]
    sequence: int | None  # of its node
    has_gradient: bool


class Differences:
    """Knows which instructions are differences."""

    def __init__(self) -> None:
        self._known: dict[tuple[CodeType, int], bool] = {}

    def operands(self, code: CodeType, frame: FrameType) -> tuple[Operand | None, Operand | None] | None:
        """Both sides of the difference that a frame computes, where a side without a gradient may be stretched."""
        key = code, frame.f_lasti
        if key not in self._known:
            self._known[key] = _is_difference(*key)
        if not self._known[key] or sys.gettrace() is not None:
            return None
        here = Frame(frame, frame.f_lasti, frame.f_lineno)
        node = here.node
        if not isinstance(node, ast.BinOp):
            return None
        left, right = (_operand(_value(side, here)) for side in (node.left, node.right))
        shapes = [len(side.shape) for side in (left, right) if side is not None and side.shape]
        # Of interest only where a target is stretched: the other side's shape may still be unknown here.
        if not any(side is not None and side.shape and not side.has_gradient for side in (left, right)):
            return None
        return None if len(shapes) == 2 and shapes[0] == shapes[1] else (left, right)


def is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def sequence_of(tensor: torch.Tensor) -> int | None:
    """The number of the node that made a tensor; None for a leaf."""
    return None if tensor.grad_fn is None else int(tensor.grad_fn._sequence_nr())


def _is_difference(code: CodeType, lasti: int) -> bool:
    found = next((each for each in dis.get_instructions(code) if each.offset == lasti), None)
    return found is not None and found.opname == "BINARY_OP" and found.argrepr == "-"


def _operand(value: Any) -> Operand | None:
    return Operand(tuple(value.shape), sequence_of(value), value.requires_grad) if is_plain(value) else None


def _value(side: ast.expr, frame: Frame) -> Any:
    """The value of one side: of a name, or of attributes, items and methods of one, such as `batch["y"].float()`.

    None for the result of an operator, a function or a layer, which is not computed again, and for a part of a tensor
    with a gradient: the copy that is read here has none.
    """
    node = side
    while not isinstance(node, ast.Name):
        inner = node.func if isinstance(node, ast.Call) else node
        if not isinstance(inner, ast.Attribute | ast.Subscript):
            return None
        owner = read(inner.value, frame)
        if owner.requires_grad if is_plain(owner) else isinstance(node, ast.Call):
            return None
        node = inner.value
    return read(side, frame)
