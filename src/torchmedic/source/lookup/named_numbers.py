"""Settings that the user's files spell out under a name: a learning rate, a factor, the reduction of a loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import FUNCTIONS, nodes_in, syntax_tree
from torchmedic.source.user_variables import loaded_files

_RATE_NAMES = ("lr", "learning_rate", "rate", "eta", "alpha", "step_size")  # that a variable may have, or end with


def value_written_at(
    value: float, cause: Location | None, label: str, role: Role = "origin", *, any_name: bool = False
) -> Location | None:
    """The only named number in the user's files with a value; None where the cause shows it already.

    The name must be that of a learning rate, unless any will do.
    """
    found = written_at(value, any_name=any_name)
    origin = node_location(role, *found, label) if found is not None else None
    if origin is None or (cause is not None and (origin.file, origin.line) == (cause.file, cause.line)):
        return None
    return origin


def is_number(node: ast.AST | None, value: float) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return is_number(node.operand, -value)
    return (
        isinstance(node, ast.Constant)
        and type(node.value) is not bool
        and isinstance(node.value, int | float)
        and node.value == value
    )


def written_at(value: float, *, any_name: bool = False) -> tuple[str, ast.AST] | None:
    """The only named number in the user's files with this value; most often the name must be that of a rate."""
    found = [
        (file, node)
        for file in loaded_files()
        for name, node in _named_values(syntax_tree(file))
        if node is not None and is_number(node, value) and (any_name or _names_rate(name))
    ]
    return found[0] if len(found) == 1 else None


def reduction_written_at(value: str, role: Role, label: str) -> Location | None:
    """The only place in the user's files that gives a loss its reduction."""
    found = [
        (file, node)
        for file in loaded_files()
        for name, node in _named_values(syntax_tree(file))
        if name == "reduction" and isinstance(node, ast.Constant) and node.value == value
    ]
    return node_location(role, *found[0], label) if len(found) == 1 else None


def _names_rate(name: str) -> bool:
    """`lr`, `base_lr`, `lr_critic`, `learning_rates`."""
    plain = name.lower().rstrip("s")
    return plain.endswith(_RATE_NAMES) or any(plain.startswith(f"{each}_") for each in _RATE_NAMES)


def _named_values(tree: ast.AST | None) -> Iterator[tuple[str, ast.AST | None]]:
    """Values with their names: keyword arguments, defaults, entries of dicts, assignments."""
    for node in nodes_in(tree):
        match node:
            case ast.Call(args=[ast.Constant(value=str() as name), *_], keywords=keywords):
                yield from ((name if each.arg == "default" else each.arg or "", each.value) for each in keywords)
            case ast.Call(keywords=keywords):
                yield from ((each.arg or "", each.value) for each in keywords)
            case ast.Dict(keys=keys, values=values):
                named = zip(keys, values, strict=True)
                yield from ((str(key.value), value) for key, value in named if isinstance(key, ast.Constant))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from ((ast.unparse(each), value) for each, value in zip(targets, values, strict=False))
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
                yield ast.unparse(target).rpartition(".")[2], value
            case _ if isinstance(node, FUNCTIONS):
                given = node.args
                plain = [*given.posonlyargs, *given.args]
                pairs = zip([each.arg for each in plain[::-1]], given.defaults[::-1], strict=False)
                yield from pairs
                yield from zip([each.arg for each in given.kwonlyargs], given.kw_defaults, strict=True)
