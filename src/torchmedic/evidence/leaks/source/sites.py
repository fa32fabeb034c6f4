"""Statements and calls of the user's source, each with the functions, loops and branches around it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchmedic.source.assignments import is_blank
from torchmedic.source.syntax import (
    CALLABLES,
    COMPREHENSIONS,
    LOOPS,
    Path,
    callee,
    function_around,
    makes_number,
    nodes_in,
    syntax_tree,
)

_AROUND = CALLABLES | LOOPS | ast.If | ast.ExceptHandler | ast.ClassDef | COMPREHENSIONS
_NOTED = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.Delete | ast.Call | ast.With | ast.AsyncWith
_BUILDERS = frozenset({"__init__", "__post_init__", "__new__", "setup", "build", "<module>"})


class Site(NamedTuple):
    """A statement or call of the user's code that changes a holder."""

    file: str
    node: ast.expr | ast.stmt
    value: ast.expr | None  # what is put in, or the new value of a holder that is made anew
    path: Path  # from the module inwards

    @property
    def function(self) -> ast.AST | None:
        """The innermost function around."""
        return function_around(self.path)

    @property
    def builds(self) -> bool:
        """Whether the statement stands in a function that makes an object ready, as `__init__` does."""
        return getattr(self.function, "name", "") in _BUILDERS

    @property
    def loops(self) -> list[ast.AST]:
        """The loops around, in the same function, the innermost first."""
        found: list[ast.AST] = []
        for node in reversed(self.path):
            if isinstance(node, CALLABLES):
                break
            if isinstance(node, LOOPS):
                found.append(node)
        return found

    @property
    def is_little(self) -> bool:
        """Whether the value is plainly a number, or a new container that is only about to be filled."""
        value = self.value
        is_number = isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Call) and makes_number(value))
        return is_number or (value is not None and is_blank(value))

    @property
    def is_guarded(self) -> bool:
        """Whether the statement fills a cache: it runs only where the key is not there yet."""
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
    """The lines that fill a holder, the lines that empty it, and whether it is filled only up to a length."""

    puts: list[Site]
    takes: list[Site]
    is_limited: bool


def nodes_of(file: str) -> list[tuple[ast.AST, Path]]:
    """The assignments, loops, deletions, calls and contexts of a file in order, each with what stands around it."""
    tree = syntax_tree(file) if file else None
    return _paths(tree) if tree is not None else []


@functools.lru_cache(maxsize=32)
def _paths(tree: ast.Module) -> list[tuple[ast.AST, Path]]:
    found: list[tuple[ast.AST, Path]] = []
    pending: list[tuple[ast.AST, Path]] = [(tree, ())]
    while pending:
        node, path = pending.pop()
        if isinstance(node, _NOTED):
            found.append((node, path))
        inner = (*path, node) if isinstance(node, _AROUND) else path
        pending.extend((child, inner) for child in ast.iter_child_nodes(node))
    return sorted(found, key=lambda entry: (entry[0].lineno, entry[0].col_offset))  # type: ignore[attr-defined]


def functions_of(name: str, files: Iterable[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a name, with their files."""
    for file in dict.fromkeys(files):
        for node in nodes_in(syntax_tree(file) if file else None):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield file, node


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of the positional parameters, without `self` or `cls`."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def values_returned(name: str, files: Iterable[str]) -> list[ast.expr]:
    """The expressions that functions of the user's of this name return."""
    functions = [function for _, function in functions_of(name, files)]
    returns = [node for each in functions for node in ast.walk(each) if isinstance(node, ast.Return)]
    return [node.value for node in returns if node.value is not None]


def given_by_caller(site: Site, files: Iterable[str]) -> Site | None:
    """The only call that gives a function what it stores, where that is of an argument and not plainly a number."""
    function = site.function
    if not isinstance(function, ast.FunctionDef) or site.value is None:
        return None
    names, found = arguments_behind(site), []
    for file in dict.fromkeys(files) if names else ():
        for node, path in nodes_of(file):
            if isinstance(node, ast.Call) and callee(node) == function.name and function not in path:
                sites = [Site(file, node, value, path) for value in _given(node, function, names)]
                found += [each for each in sites if not each.is_little]
    return found[0] if len(found) == 1 else None


def is_argument(site: Site) -> bool:
    """Whether a function stores an argument of its own as it is."""
    function, value = site.function, site.value
    return isinstance(function, ast.FunctionDef) and isinstance(value, ast.Name) and value.id in parameters_of(function)


def arguments_behind(site: Site) -> set[str]:
    """The parameters of the function that the stored value is: one, a product of several, or an item of one."""
    function = site.function
    if not isinstance(function, ast.FunctionDef):
        return set()
    arguments = function.args
    known = {*parameters_of(function), *(each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None)}
    if site.value is None or not _is_plain(site.value, site.node):
        return set()
    used = {node.id for node in ast.walk(site.value) if isinstance(node, ast.Name)}
    for loop in site.loops:
        if isinstance(loop, ast.For) and used & {
            each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)
        }:
            used |= {each.id for each in ast.walk(loop.iter) if isinstance(each, ast.Name)}
    return used & known


def _is_plain(value: ast.expr, statement: ast.AST) -> bool:
    """Whether a value is made of variables, numbers and the holder itself alone, so that its graph came with them."""
    match value:
        case ast.BinOp(left=left, right=right):
            return _is_plain(left, statement) and _is_plain(right, statement)
        case ast.Attribute():
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            return any(isinstance(each, ast.Attribute) and ast.unparse(each) == ast.unparse(value) for each in targets)
        case _:
            return isinstance(value, ast.Name | ast.Constant)


def _given(call: ast.Call, function: ast.FunctionDef, names: set[str]) -> Iterator[ast.expr]:
    """What a call gives for these parameters of a function; of a display, what is in it."""
    known, arguments = parameters_of(function), function.args
    values = [value for name, value in zip(known, call.args, strict=False) if name in names]
    if arguments.vararg is not None and arguments.vararg.arg in names:
        values += call.args[len(known) :]
    takes_rest = arguments.kwarg is not None and arguments.kwarg.arg in names
    values += [word.value for word in call.keywords if word.arg in names or (takes_rest and word.arg not in known)]
    for value in values:
        match value:
            case ast.Dict(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                yield from parts
            case _:
                yield value
