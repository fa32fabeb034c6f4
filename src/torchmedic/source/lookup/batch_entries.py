"""The expressions of the user's that make an entry of a batch: the labels of a data set, of a collate function."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.source.assignments import assigned, is_blank
from torchmedic.source.syntax import FUNCTIONS, callee, innermost, last_name, nodes_in, own_nodes
from torchmedic.source.user_variables import user_trees

_MAX_NAMES = 3  # that stand for each other
_WRAPS = ("tensor", "as_tensor", "LongTensor", "stack")


def entries_made(name: str) -> Iterator[tuple[str, ast.expr]]:
    """The expressions of the user's that make an entry: in a dict, in a call, for an item, or appended to it."""
    for file, tree in user_trees():
        for node in nodes_in(tree):
            match node:
                case ast.Dict(keys=keys, values=values):
                    given = [value for key, value in zip(keys, values, strict=True) if _is_name(key, name)]
                case ast.Call(func=ast.Attribute(value=ast.Subscript(slice=key), attr="append"), args=[value]) if (
                    _is_name(key, name)
                ):
                    given = [value]
                case ast.Call(keywords=keywords):
                    given = [word.value for word in keywords if word.arg == name]
                case ast.Assign(targets=[ast.Subscript(slice=key)], value=value) if _is_name(key, name):
                    given = [value]
                case _:
                    continue
            made = [_made(tree, value) for value in given]
            yield from ((file, value) for value in made if not is_blank(value) and not _passes_on(value, name))


def _is_name(key: ast.expr | None, name: str) -> bool:
    return isinstance(key, ast.Constant) and key.value == name


def _made(tree: ast.AST, value: ast.expr) -> ast.expr:
    """The only expression that a name stands for in its function; for a list, what is appended."""
    around = innermost(tree, value.lineno, FUNCTIONS) or tree
    for _ in range(_MAX_NAMES):
        inner = value.args[0] if isinstance(value, ast.Call) and callee(value) in _WRAPS and value.args else value
        if not isinstance(inner, ast.Name):
            break
        nodes = list(own_nodes(around))
        found = [
            made
            for node in nodes
            for target, made in assigned(node)
            if isinstance(target, ast.Name) and target.id == inner.id and made is not value
        ]
        if found and all(is_blank(made) for made in found):
            calls = [node for node in nodes if isinstance(node, ast.Call) and callee(node) == "append" and node.args]
            found = [call.args[0] for call in calls if ast.unparse(call.func) == f"{inner.id}.append"]
        elif inner is not value:
            break  # the tensor is made here
        if len(found) != 1:
            break
        value = found[0]
    return value


def _passes_on(value: ast.expr, name: str) -> bool:
    """Whether an expression takes an entry that there is, and adds nothing to it."""
    nodes = list(ast.walk(value))
    reads = any(isinstance(node, ast.Subscript) and _is_name(node.slice, name) for node in nodes)
    reads |= any(last_name(node) == name for node in nodes)
    adds = any(isinstance(node, ast.BinOp) or (isinstance(node, ast.Call) and "pad" in callee(node)) for node in nodes)
    return reads and not adds
