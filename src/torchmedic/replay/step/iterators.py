"""Statements that take the next item of an iterator, which no replay can set back."""

from __future__ import annotations

import ast
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


def draws_from_iterator(statement: ast.stmt, namespace: dict[str, Any]) -> bool:
    """Whether a statement is `x = next(iterator)`, alone or in a `try`, so that its result is to be taken over.

    The iterator of a DataLoader is none of these: in a replay it repeats its batch.
    """
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Try):
        return False
    drawn = [argument for node in ast.walk(statement) if (argument := _drawn_from(node)) is not None]
    if not drawn:
        return False
    try:
        iterators = [eval(compile(ast.Expression(node), "<next>", "eval"), namespace) for node in drawn]
    except Exception:
        return False
    bound = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return not any(isinstance(iterator, _BaseDataLoaderIter) for iterator in iterators) and all(
        name in namespace for name in bound
    )


def _drawn_from(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.Call(func=ast.Name(id="next"), args=[ast.Name() | ast.Attribute() as iterator, *_]):
            return iterator
    return None
