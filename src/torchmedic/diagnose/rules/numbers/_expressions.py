"""What stands around an expression in the user's source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.diagnose.cures.edits import statement_at, whole
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.syntax import blocks, nodes_in, syntax_tree


def same_place(node: ast.expr, statement: ast.AST) -> ast.expr | None:
    """The expression of a statement that stands where another reading of the source has this one."""
    place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
    for part in ast.walk(statement):
        if isinstance(part, ast.expr) and (part.lineno, part.col_offset, part.end_lineno, part.end_col_offset) == place:
            return part
    return None


def enclosing(node: ast.expr, spot: Spot) -> Iterator[tuple[ast.expr, Spot]]:
    """The expressions of the same statement around an expression, the innermost first."""
    statement = statement_at(spot)
    if statement is None:
        return
    parents = {id(child): parent for parent in ast.walk(statement) for child in ast.iter_child_nodes(parent)}
    here: ast.AST | None = same_place(node, statement)
    while here is not None:
        here = parents.get(id(here))
        if isinstance(here, ast.expr):
            yield here, whole(spot, here)


def only_use(node: ast.expr, spot: Spot) -> tuple[str, ast.expr] | None:
    """Where `name = <node>` is followed by one statement that uses the name: the expression around the first use."""
    tree = syntax_tree(spot.file)
    statement = statement_at(spot)
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if ast.dump(value) == ast.dump(node):
            pass
        case _:
            return None
    for block in (block for part in nodes_in(tree) for block in blocks(part)):
        position = next((n for n, part in enumerate(block) if part.lineno == statement.lineno), None)
        if position is None:
            continue
        using = [part for part in block[position + 1 :] if _reads(part, name)]
        if len(using) != 1:
            return None
        for part in ast.walk(using[0]):
            if isinstance(part, ast.BinOp) and isinstance(part.left, ast.Name) and part.left.id == name:
                return name, part
    return None


def _reads(statement: ast.stmt, name: str) -> bool:
    return any(
        isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load)
        for part in ast.walk(statement)
    )
