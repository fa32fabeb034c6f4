"""Which variables and attributes each line of a file reads, and which it gives a value or writes into."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.source.syntax import CALLABLES, FUNCTIONS, nodes_in, syntax_tree

_MAX_ATTRIBUTES = 3  # in a path such as `self.data.rows`

Path = tuple[str, ...]  # a variable, and the attributes below it


class Accesses(NamedTuple):
    """What the statements of one line do with variables."""

    reads: frozenset[Path]
    binds: frozenset[str]  # names that get a new value
    writes: frozenset[Path]  # all that gets a value, or that something is put into


NO_ACCESSES = Accesses(frozenset(), frozenset(), frozenset())


@functools.lru_cache(maxsize=64)
def accesses_by_line(file: str) -> dict[int, Accesses]:
    """The accesses of each line; a statement of several lines counts for each of its lines."""
    found: dict[int, Accesses] = {}
    tree = syntax_tree(file)
    for statement in (node for node in (ast.walk(tree) if tree is not None else ()) if isinstance(node, ast.stmt)):
        if isinstance(statement, FUNCTIONS | ast.ClassDef):
            continue
        parts = _own_parts(statement)
        accesses = of_nodes(parts)
        lines = [line for part in parts for line in range(_first(part), (getattr(part, "end_lineno", 0) or 0) + 1)]
        for line in dict.fromkeys(lines):
            other = found.get(line, NO_ACCESSES)
            found[line] = Accesses(
                other.reads | accesses.reads, other.binds | accesses.binds, other.writes | accesses.writes
            )
    return found


@functools.lru_cache(maxsize=64)
def context_blocks(file: str) -> dict[int, int]:
    """By the line of each `with` statement, the last line of its block. Python comes back to that line at the end."""
    statements = nodes_in(syntax_tree(file))
    return {node.lineno: node.end_lineno or 0 for node in statements if isinstance(node, ast.With | ast.AsyncWith)}


def of_nodes(nodes: list[ast.AST]) -> Accesses:
    """The accesses of some statements or expressions, and of all inside them."""
    reads: set[Path] = set()
    binds: set[str] = set()
    writes: set[Path] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                binds.add(name)
                writes.add((name,))
            case ast.Name(id=name):
                reads.add((name,))
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                writes |= set(_path(node))
            case ast.Attribute():
                reads |= set(_path(node))
            case ast.AugAssign(target=target):
                reads |= set(_path(target))
                writes |= set(_path(target))
            case ast.Expr(value=ast.Call() as call):
                writes |= set(_touched(call))
    return Accesses(frozenset(reads), frozenset(binds), frozenset(writes))


def _touched(call: ast.Call) -> Iterator[Path]:
    """What a call whose result nobody takes may write into: its object, and its arguments."""
    if isinstance(call.func, ast.Attribute):
        yield from _path(call.func.value)
    for argument in (*call.args, *(each.value for each in call.keywords)):
        yield from _path(argument)


def _path(node: ast.AST) -> Iterator[Path]:
    """The path of the variable or attribute that an expression takes something out of."""
    names: list[str] = []
    while True:
        match node:
            case ast.Attribute(value=value, attr=attr):
                names.insert(0, attr)
                node = value
            case ast.Subscript(value=value):
                names.clear()
                node = value
            case ast.Name(id=name):
                yield (name, *names[:_MAX_ATTRIBUTES])
                return
            case _:
                return


def _own_parts(statement: ast.stmt) -> list[ast.AST]:
    """A statement; of one with a block, what stands in its header."""
    match statement:
        case ast.For(target=target, iter=over) | ast.AsyncFor(target=target, iter=over):
            return [target, over]
        case ast.While(test=test) | ast.If(test=test):
            return [test]
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return [part for item in items for part in (item.context_expr, item.optional_vars) if part is not None]
        case ast.Try() | ast.TryStar() | ast.Match():
            return []
    return [] if isinstance(statement, CALLABLES) else [statement]


def _first(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))
