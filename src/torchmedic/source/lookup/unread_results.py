"""Lines that put the result of a call into a variable that nothing in their function reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.source.syntax import FUNCTIONS, has_line, innermost, nodes_in, syntax_tree

# With any of these a name may be used without being written.
INDIRECT_READS = frozenset(
    "getattr attrgetter get_submodule children named_children modules named_modules _modules locals vars __dict__ "
    "eval".split()
)


def unread_results(function: ast.AST) -> Iterator[tuple[ast.Assign, str]]:
    """The statements of a function that assign the result of a call, and the name that is never read."""
    for statement in nodes_in(function):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
                if not name.startswith("_") and not _is_read(function, name):
                    yield statement, name
            case ast.Assign(targets=[ast.Tuple(elts=parts)], value=ast.Call()):
                names = [part.id for part in parts if isinstance(part, ast.Name)]
                used = [name for name in names if not name.startswith("_")]
                is_lost = used and len(names) == len(parts) and not any(_is_read(function, name) for name in names)
                if is_lost:
                    yield statement, used[-1]


def unread_result(file: str, line: int) -> tuple[ast.Assign, str] | None:
    """The unread result at a line, in the innermost function around it."""
    function = innermost(syntax_tree(file), line, FUNCTIONS)
    found = unread_results(function) if function is not None else ()
    return next(((statement, name) for statement, name in found if has_line(statement, line)), None)


def _is_read(function: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Name)
        and (node.id in INDIRECT_READS or (node.id == name and not isinstance(node.ctx, ast.Store)))
        for node in ast.walk(function)
    )
