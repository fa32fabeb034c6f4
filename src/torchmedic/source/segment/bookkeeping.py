"""Statements that only keep books (append to lists, print, save): a step is the same without them."""

from __future__ import annotations

import ast

from torchmedic.source.blocks import Block
from torchmedic.source.name_use import names_read
from torchmedic.source.syntax import callee

BOOKKEEPING = frozenset(
    "append extend add insert put write log info debug warning warn print add_scalar add_scalars add_histogram "
    "set_postfix set_description update_postfix record save dump flush update log_metrics appendleft".split()
)


def needed(statements: Block, tensors: set[str]) -> Block:
    """Leave out what only keeps books: an expression statement whose call is known to do no more than that."""
    last = len(statements) - 1
    return [
        statement
        for position, statement in enumerate(statements)
        if position == last or not _is_bookkeeping(statement, statements[position + 1 :], tensors)
    ]


def _is_bookkeeping(statement: ast.stmt, rest: Block, tensors: set[str]) -> bool:
    if isinstance(statement, ast.Assert | ast.Pass | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
        return not isinstance(statement, ast.Import | ast.ImportFrom)
    if isinstance(statement, ast.AugAssign):
        # `total += loss.item()` keeps books; `loss += aux` does not, nor does what writes to a tensor's memory.
        name = statement.target.id if isinstance(statement.target, ast.Name) else None
        return name is not None and name not in tensors and not any(name in names_read(later) for later in rest)
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    return callee(statement.value) in BOOKKEEPING
