"""Sums of a loss and a term that a statement computes and throws away: `loss + 0.1 * penalty`."""

from __future__ import annotations

import ast

from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import FUNCTIONS, nodes_in
from torchmedic.source.user_variables import user_trees


def discarded_sum() -> Location | None:
    """The only statement of a function or loop that adds a term, read nowhere else, and does nothing with the sum."""
    found = {
        (file, node.lineno): node
        for file, tree in user_trees()
        for block in nodes_in(tree)
        if isinstance(block, FUNCTIONS | ast.For | ast.While)
        for node in ast.walk(block)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add | ast.Sub)
        if _has_lost_term(node, block)
    }
    place = next(iter(found), None)
    return (
        node_location("cause", place[0], found[place], "the result is thrown away")
        if len(found) == 1 and place
        else None
    )


def _has_lost_term(statement: ast.Expr, block: ast.AST) -> bool:
    """Whether a name in a statement is read nowhere else around it."""
    reads = [node.id for node in ast.walk(block) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return any(isinstance(node, ast.Name) and reads.count(node.id) == 1 for node in ast.walk(statement))
