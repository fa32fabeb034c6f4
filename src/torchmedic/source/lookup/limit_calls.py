"""The user's own line that sets a limit of the process, found in the source when the limit has been reached."""

from __future__ import annotations

import ast

from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location, syntax_tree
from torchmedic.source.syntax import callee, last_name, nodes_in
from torchmedic.source.user_variables import user_files

_SETTERS = frozenset({"setrlimit", "prlimit"})


def limit_call(name: str, role: Role, label: str) -> Location | None:
    """The first call in the user's files that sets this limit."""
    for file in user_files():
        tree = syntax_tree(file)
        for node in nodes_in(tree):
            if isinstance(node, ast.Call) and callee(node) in _SETTERS:
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                if any(last_name(each) == name for each in given):
                    return node_location(role, file, node, label)
    return None
