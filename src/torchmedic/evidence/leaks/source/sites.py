"""Statements and calls of the user's source, each in what stands around it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.syntax import CALLABLES, COMPREHENSIONS, LOOPS, nodes_in
from torchmedic.source.vocabulary import makes_number

_AROUND = (CALLABLES | LOOPS) | (ast.If | ast.ExceptHandler | ast.ClassDef) | COMPREHENSIONS
_NOTED = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete | ast.Call | ast.With | ast.AsyncWith
_BUILDERS = frozenset({"__init__", "__post_init__", "__new__", "setup", "build", "<module>"})
_GIVING = frozenset({"__getitem__", "__next__", "__iter__"})
_MAKERS = frozenset("list dict set deque defaultdict OrderedDict Counter".split())


class Site(NamedTuple):
    """A statement or call of the user's, in the function that it stands in."""

    file: str
    node: ast.expr | ast.stmt
    value: ast.expr | None  # what is put in
    path: tuple[ast.AST, ...]  # from the module inwards

    @property
    def function(self) -> ast.AST | None:
        return next((node for node in reversed(self.path) if isinstance(node, CALLABLES)), None)

    @property
    def builds(self) -> bool:
        """Whether it stands in a function that makes an object ready."""
        return getattr(self.function, "name", "") in _BUILDERS

    @property
    def gives_data(self) -> bool:
        """Whether it stands in a function that hands out data one by one: a generator, or part of an iterator."""
        function = self.function
        if function is None:
            return False
        return getattr(function, "name", "") in _GIVING or any(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)
        )

    @property
    def loops(self) -> list[ast.AST]:
        """Around it, in its own function."""
        found: list[ast.AST] = []
        for node in reversed(self.path):
            if isinstance(node, CALLABLES):
                break
            if isinstance(node, LOOPS):
                found.append(node)
        return found

    @property
    def is_number(self) -> bool:
        """Whether what it puts in is plainly a number."""
        value = self.value
        if isinstance(value, ast.Constant | ast.JoinedStr):
            return True
        return isinstance(value, ast.Call) and makes_number(value)

    @property
    def is_little(self) -> bool:
        """Whether what it puts in is plainly a number, or a new container that is only about to be filled."""
        return self.is_number or is_empty(self.value)

    @property
    def is_guarded(self) -> bool:
        """Whether it fills a cache: it runs only where the key is not there yet."""
        for node in self.path:
            if isinstance(node, ast.If) and any(
                isinstance(part, ast.Compare)
                and any(isinstance(op, ast.NotIn | ast.In | ast.Is | ast.IsNot) for op in part.ops)
                for part in ast.walk(node.test)
            ):
                return True
            if isinstance(node, ast.ExceptHandler) and "KeyError" in (ast.unparse(node.type) if node.type else ""):
                return True
        return False


class Traffic(NamedTuple):
    """What the source says of one holder: who fills it, who empties it, and whether it is filled up to a length."""

    puts: list[Site]
    takes: list[Site]
    is_limited: bool


def is_empty(value: ast.expr | None) -> bool:
    """A constant, a new container, or several of them."""
    match value:
        case ast.List(elts=elements) | ast.Set(elts=elements) | ast.Tuple(elts=elements):
            return all(is_empty(each) for each in elements)
        case ast.Dict(keys=keys):
            return not keys
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args):
            return name in _MAKERS and (not args or name == "defaultdict")
    return isinstance(value, ast.Constant)


def nodes_of(file: str) -> list[tuple[ast.AST, tuple[ast.AST, ...]]]:
    tree = syntax_tree(file)
    return _paths(tree) if tree is not None else []


@functools.lru_cache(maxsize=32)
def _paths(tree: ast.Module) -> list[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """The assignments, deletions, calls and contexts of a file, each with what stands around it."""
    found: list[tuple[ast.AST, tuple[ast.AST, ...]]] = []
    pending: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while pending:
        node, path = pending.pop()
        if isinstance(node, _NOTED):
            found.append((node, path))
        inner = (*path, node) if isinstance(node, _AROUND) else path
        pending.extend((child, inner) for child in ast.iter_child_nodes(node))
    return sorted(found, key=lambda entry: (entry[0].lineno, entry[0].col_offset))  # type: ignore[attr-defined]


def functions_of(name: str, files: Iterable[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in dict.fromkeys(files):
        tree = syntax_tree(file) if file else None
        for node in nodes_in(tree):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield file, node
