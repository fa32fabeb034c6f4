"""Which names statements read, which they assign, and which of those they read first."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.source.blocks import Block, blocks
from torchmedic.source.syntax import CALLABLES


def read_first(block: Block) -> set[str]:
    """Names that statements read before they assign them."""
    return _read_first(block, set())


def _read_first(block: Block, written: set[str]) -> set[str]:
    """`written` holds what has been assigned so far, and is added to where that is certain."""
    found: set[str] = set()
    for statement in block:
        inner = list(blocks(statement)) if not isinstance(statement, CALLABLES | ast.ClassDef) else []
        if not inner:
            found |= names_read(statement) - written
            written |= set(names_written(statement))
            continue
        header = _header(statement)
        found |= {name for part in header for name in names_read(part)} - written
        bound = {name for part in header for name in names_written(part)}
        after = [written | bound for _ in inner]
        for part, known in zip(inner, after, strict=True):
            found |= _read_first(part, known)
        # Only one block of an `if` is run, and that of a loop perhaps never; but all of a `with`.
        certain = isinstance(statement, ast.With | ast.AsyncWith) or (isinstance(statement, ast.If) and len(inner) > 1)
        written |= set.intersection(*after) if certain else bound
    return found


def _header(statement: ast.stmt) -> list[ast.AST]:
    """The parts of a compound statement that are not blocks."""
    return [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt | ast.ExceptHandler)]


def names_written(statement: ast.AST) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id


def names_read(statement: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        names.add(statement.target.id)
    return names
