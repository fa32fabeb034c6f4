"""Tables with a row per position, such as a positional encoding, whose first rows are added along the first dimension.

`x + self.pe[: x.size(0)]` is right where the positions come first. A table of the shape (length, 1, width) is added to
examples that come first all the same: then each example has a row of its own, and all positions of it have the same.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torchmedic.observe.checkup.mixed_dimensions import rows
from torchmedic.source.live_frames import position_of
from torchmedic.source.syntax import has_line, nodes_in, syntax_tree

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node
    from torchmedic.observe.checkup.node_births import Site


def added_tables(graph: LossGraph) -> Iterator[tuple[Node, str]]:
    """The sums of three dimensions that are given the first rows of an attribute of `self`, and its name."""
    for node in graph.nodes:
        has_shape = node.kind == "AddBackward" and len(node.shape or ()) == 3
        if has_shape and node.birth is not None and node.birth.layer is None and node.birth.sites:
            name = _table_at(node.birth.sites[0])
            if name:
                yield node, name


def has_examples_first(graph: LossGraph, node: Node, drawn: Collection[int]) -> bool:
    """Whether the first dimension of a result is that of the examples, and the second is not.

    Args:
        graph: The graph.
        node: The operation.
        drawn: Sizes of batches whose items a DataLoader has drawn at random.
    """
    first, second = (node.shape or (0, 0))[:2]
    if first == second or 1 in (first, second):
        return False
    if drawn:
        return first in drawn and second not in drawn
    per_step = any(second in call.target_shape[1:] for call in graph.losses())
    return rows(graph) == first and not per_step


def _table_at(site: Site) -> str:
    """The attribute whose first rows a sum takes; empty for any other sum."""
    file = site.code.co_filename
    line, end_line, column, end_column = position_of(site.code, site.lasti)
    if line is None:
        return ""
    for node in nodes_in(syntax_tree(file)):
        match node:
            case ast.BinOp(op=ast.Add(), left=left, right=right) if has_line(node, line):
                operands = [left, right]
            case ast.AugAssign(op=ast.Add(), value=right) if has_line(node, line):
                operands = [right]
            case _:
                continue
        if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == (line, end_line, column, end_column):
            return next((name for operand in operands if (name := _first_rows(operand))), "")
    return ""


def _first_rows(operand: ast.expr) -> str:
    """The name of `self.name[:n]` or `self.name[:n, :]`, also with a method or a wrapper around it."""
    for part in ast.walk(operand):
        match part:
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=name), slice=index):
                first, *others = index.elts if isinstance(index, ast.Tuple) else [index]
                whole = all(isinstance(each, ast.Slice) and each.upper is None for each in others)
                if isinstance(first, ast.Slice) and first.lower is None and first.upper is not None and whole:
                    return name
    return ""
