"""Branches that are taken so often and no more, since each time counts up to a number that ends them."""

from __future__ import annotations

import ast


def counts_up_to(branch: ast.If) -> ast.expr | None:
    """How often a branch is taken, if no more often than that: `if self.count < self.most: self.count += 1`."""
    test = branch.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, right = test.left, test.comparators[0]
    match test.ops[0]:
        case ast.Lt() | ast.LtE():
            small, big = left, right
        case ast.Gt() | ast.GtE():
            small, big = right, left
        case _:
            return None
    if _is_counted(small, branch.body):
        return big
    return small if _is_counted(big, branch.orelse) else None


def _is_counted(name: ast.expr, body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and ast.unparse(node.target) == ast.unparse(name)
        for statement in body
        for node in ast.walk(statement)
    )
