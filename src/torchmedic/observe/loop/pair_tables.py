"""Losses that compare a table of all pairs of a batch with labels that cannot name the pairs.

In such a table each row is an example of one side, each column one of the other side, and the label of a row is the
column that belongs to it. Labels that are all the same name one column for all rows. Labels in order name the example
itself, if both sides are the same tensor. What is found stays on its device until somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from torchmedic.source.objects.graph import name_of, walk

_MIN_ROWS = 8
_MAX_ROWS = 1 << 12
_MAX_NODES = 64  # of a graph, from the loss on
_MAX_BETWEEN = 8  # nodes between a loss and its table
_SCALING = ("LogSoftmaxBackward", "MulBackward", "DivBackward", "TBackward", "TransposeBackward", "ToCopyBackward")


class PairTable(NamedTuple):
    """A table of so many rows, and whether its labels are one column for all, or the example itself."""

    rows: int
    is_one_column: torch.Tensor
    is_itself: torch.Tensor


def table_of(roots: Iterable[Any]) -> PairTable | None:
    """The first table of pairs whose rows a loss compares with labels."""
    starts = (root.grad_fn for root in roots if isinstance(root, torch.Tensor))
    for node in walk(starts, most=_MAX_NODES, nearest_first=True):
        if name_of(node).startswith("NllLossBackward"):
            with suppress(RuntimeError):  # freed, or overwritten since
                return _table(node)
    return None


def _table(loss: Any) -> PairTable | None:
    node = loss.next_functions[0][0]
    shape = tuple(node._input_metadata[0].shape) if node is not None else ()
    if len(shape) != 2 or shape[0] != shape[1] or not _MIN_ROWS <= shape[0] <= _MAX_ROWS:
        return None  # asked first: hooks of the user's may see that a saved tensor is read
    for _ in range(_MAX_BETWEEN):
        kind = name_of(node).rstrip("0123456789") if node is not None else ""
        if kind == "MmBackward":
            break
        if kind not in _SCALING:
            return None
        node = node.next_functions[0][0]
    else:
        return None
    if any(_is_weight(behind) for behind, _ in node.next_functions):
        return None
    target, rows = loss._saved_target, shape[0]
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # what is computed here would become part of the user's graph
    left, right = (
        side.detach() if side is not None else None for side in (node._saved_self, node._saved_mat2)
    )  # None where the other side has no graph
    is_one_column = (target == target[0]).all() & (target >= 0).all()
    is_itself = torch.zeros_like(is_one_column)
    if left is not None and right is not None and left.shape == right.mT.shape:
        is_same = (left == right.mT).all()
        is_itself = is_same & (target == torch.arange(rows, device=target.device)).all()
    return PairTable(rows, is_one_column, is_itself)


def _is_weight(node: Any) -> bool:
    """Whether a factor is a parameter, as of a layer."""
    if node is not None and name_of(node).startswith("TBackward"):
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), torch.nn.Parameter)
