"""Settings that the user's files spell out under a name: a learning rate, a factor, the reduction of a loss."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

import msgspec

from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import FUNCTIONS, has_line, last_name, nodes_in, syntax_tree
from torchmedic.source.user_variables import loaded_files

# Names that a variable may have, or begin or end with.
RATE = ("lr", "learning_rate", "rate", "eta", "alpha", "step_size")
_LEARNING_RATE = RATE[:2]
DECAY = ("decay", "wd")
ANY = ("",)


def set_and_used(
    value: float, use: Location | None, label: str, names: tuple[str, ...] = RATE, *, blames_name: bool = False
) -> tuple[Location, ...]:
    """The line that uses a number, as the cause, and where the user's files give the number its name, if known.

    A number that no line spells out may be computed: `lr = base_lr * batch_size / 256`.

    Args:
        value: The number.
        use: The line that uses it. Where the line spells the number out, nothing else is looked for.
        label: What to say of the line with the name.
        names: What the name may be.
        blames_name: Whether the line with the name is the cause.
    """
    statement = _statement_at(use)
    is_spelled_out = statement is not None and any(is_number(node, value) for node in ast.walk(statement))
    found = None if is_spelled_out else written_at(value, names, _words_in(statement)) or _computed_at(statement, names)
    named = node_location("cause", *found, label) if found is not None else None
    if named is None or use is None or (named.file, named.line) == (use.file, use.line):
        return tuple(each for each in (use or named,) if each is not None)
    cause, origin = (named, use) if blames_name else (use, named)
    return cause, msgspec.structs.replace(origin, role="origin")


def _computed_at(statement: ast.stmt | None, names: tuple[str, ...]) -> tuple[str, ast.AST] | None:
    """The only expression that computes what a statement passes on by name, as `SGD(..., lr=rate)`."""
    own = set(ast.walk(statement)) if statement is not None and names != ANY else set()
    words = [node for node in own if isinstance(node, ast.keyword) and _is_called(node.arg or "", names)]
    given = last_name(words[0].value) if len(words) == 1 else ""
    found = [
        (file, node)
        for file in loaded_files()
        for name, node in _named_values(syntax_tree(file))
        if name == given != "" and isinstance(node, ast.BinOp | ast.Call) and node not in own
    ]
    return found[0] if len(found) == 1 else None


def _statement_at(use: Location | None) -> ast.stmt | None:
    """The smallest statement at a place."""
    tree = syntax_tree(os.path.abspath(use.file)) if use is not None else None
    around = [node for node in nodes_in(tree) if use and isinstance(node, ast.stmt) and has_line(node, use.line)]
    return around[-1] if around and not hasattr(around[-1], "body") else None


def _words_in(statement: ast.stmt | None) -> frozenset[str]:
    """The names, attributes and keys that a statement reads."""
    read = ast.walk(statement) if statement is not None else ()
    return frozenset(
        str(getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", ""))
        for node in read
        if isinstance(node, ast.Name | ast.Attribute | ast.Constant)
    )


def is_number(node: ast.AST | None, value: float) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return is_number(node.operand, -value)
    return (
        isinstance(node, ast.Constant)
        and type(node.value) is not bool
        and isinstance(node.value, int | float)
        and node.value == value
    )


def written_at(
    value: float, names: tuple[str, ...] = RATE, used: frozenset[str] = frozenset()
) -> tuple[str, ast.AST] | None:
    """The only number in the user's files with this value and one of these names.

    Where several have it, the only one of them counts whose name is among those that are `used`.
    """
    named = [
        (name.lstrip("-").replace("-", "_"), (file, node))
        for file in loaded_files()
        for name, node in _named_values(syntax_tree(file))
        if node is not None and is_number(node, value)
    ]
    fitting = [found for name, found in named if _is_called(name, names)]
    read = [found for name, found in named if name in used]
    both = [found for found in read if found in fitting]
    return next((found[0] for found in (both, fitting, read) if len(found) == 1), None)


def rate_passed_at() -> tuple[str, ast.AST] | None:
    """The only argument for a learning rate that gets a value from elsewhere: `learning_rate=options.lr`."""
    found = [
        (file, node)
        for file in loaded_files()
        for node in nodes_in(syntax_tree(file))
        if isinstance(node, ast.keyword) and _is_called(node.arg or "", _LEARNING_RATE)
        if not isinstance(node.value, ast.Constant)
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


def _is_called(name: str, names: tuple[str, ...]) -> bool:
    """`lr`, `base_lr`, `lr_critic`, `learning_rates`."""
    plain = name.lower().rstrip("s")
    return plain.endswith(names) or any(plain.startswith(f"{each}_") for each in names)


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
