"""Lines that put the result of a call into a variable that nothing in their function reads."""

from __future__ import annotations

import ast

from torchmedic.source.syntax import FUNCTIONS, has_line, innermost, nodes_in, syntax_tree

# With any of these a name may be used without being written.
INDIRECT_READS = frozenset(
    "getattr children named_children modules named_modules _modules locals vars __dict__ eval".split()
)


def unread_result(file: str, line: int) -> tuple[ast.Assign, str] | None:
    """The statement at a line that assigns the result of a call, and the name that is never read."""
    tree = syntax_tree(file)
    function = innermost(tree, line, FUNCTIONS) if tree is not None else None
    for statement in nodes_in(function):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()) if has_line(statement, line):
                is_unread = function is not None and not name.startswith("_") and not _is_read(function, name)
                return (statement, name) if is_unread else None
    return None


def _is_read(function: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Name)
        and (node.id in INDIRECT_READS or (node.id == name and not isinstance(node.ctx, ast.Store)))
        for node in ast.walk(function)
    )
