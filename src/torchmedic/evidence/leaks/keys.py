"""Whether a dict that is filled by key may fill up: its keys are names of something, or they count without end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torchmedic.evidence.leaks.source.sites import Site, nodes_of, parameters_of
from torchmedic.observe.heap.walk import Held
from torchmedic.source.syntax import LOOPS, Path, callee, function_around, last_name

_KEYED_METHODS = ("setdefault", "update", "__setitem__")
_COUNTERS = ("range", "enumerate", "count")
# Functions that return another value every time.
_NEW_VALUES = frozenset(
    "random uniform gauss normalvariate time time_ns perf_counter monotonic now uuid1 uuid4 token_hex".split()
)
_CONVERSIONS = frozenset({"str", "repr", "int", "float", "tuple", "format"})  # a counter stays a counter
_MAX_ASSIGNMENTS = 2  # that a key is followed through


def key_of(site: Site) -> ast.expr | None:
    """The key under which a line stores; None where it only adds at the end."""
    node: Any = site.node
    match node:
        case ast.Assign(targets=[ast.Subscript(slice=key), *_]):
            return key
        case ast.Call(func=ast.Attribute(attr=method), args=[first, *_]) if method in _KEYED_METHODS:
            return first
    return None


def counts(held: Held, site: Site, files: list[str]) -> bool:
    """Whether the key is another one every time, as far as the source shows it."""
    if held.keys:
        return True
    if held.via == "cache":
        return _is_called_with_counter(held, files, strictly=False)
    key = key_of(site)
    return key is None or _is_counter(key, site.path, site.file, files)


def never_returns(held: Held, site: Site, files: list[str]) -> bool:
    """Whether a key that was asked for once is never asked for again, so that a cache is of no use."""
    if held.keys:
        return held.keys == "lost"
    if held.via == "cache":
        return _is_called_with_counter(held, files, strictly=True)
    key = key_of(site)
    return key is not None and _is_counter(key, site.path, site.file, files, strictly=True)


def is_bounded(site: Site) -> bool:
    """Whether the key is a remainder, of which there are only so many: `ring[step % size]`."""
    key = key_of(site)
    if isinstance(key, ast.Name):
        values = list(_assigned({key.id}, site.path, site.file))
        return bool(values) and all(_is_remainder(value) for value in values)
    return key is not None and _is_remainder(key)


def is_by_identity(site: Site) -> bool:
    """Whether the key is the `id` of an object, so that each new object has a new one."""
    key = key_of(site)
    if key is None:
        return False
    names = {part.id for part in ast.walk(key) if isinstance(part, ast.Name)}
    return any(_calls(value, "id") for value in (key, *_assigned(names, site.path, site.file)))


def _is_remainder(value: ast.AST) -> bool:
    """`step % size` or `step & 63`, but not `"%d" % step`."""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mod | ast.BitAnd):
        return False
    return not (isinstance(value.left, ast.Constant) and isinstance(value.left.value, str))


def _calls(tree: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Call) and callee(part) == name for part in ast.walk(tree))


def _is_called_with_counter(held: Held, files: list[str], *, strictly: bool) -> bool:
    return any(
        _is_counter(argument, path, file, files, strictly=strictly)
        for file in files
        for node, path in nodes_of(file)
        if isinstance(node, ast.Call) and callee(node) == held.last
        for argument in node.args
    )


def _is_counter(
    key: ast.expr, path: Path, file: str, files: list[str], depth: int = _MAX_ASSIGNMENTS, *, strictly: bool = False
) -> bool:
    """Whether a key is made from a counter; `strictly`: it is a counter, and not only looked up by one."""
    parts = list(_parts_of_value(key) if strictly else ast.walk(key))
    if any(_is_remainder(part) for part in parts):
        return False
    if any(isinstance(part, ast.Call) and callee(part) in _NEW_VALUES for part in parts):
        return True
    names = {ast.unparse(part) for part in parts if isinstance(part, ast.Name | ast.Attribute)}
    if not names.isdisjoint(_counters(file, path, files, strictly=strictly)):
        return True
    if depth > 0 and any(
        _is_counter(value, path, file, files, depth - 1, strictly=strictly) for value in _assigned(names, path, file)
    ):
        return True
    given = list(_passed(names, path, files)) if depth > 0 else []
    return bool(given) and all(_is_counter(*each, files, depth - 1, strictly=strictly) for each in given)


def _passed(names: set[str], path: Path, files: list[str]) -> Iterator[tuple[ast.expr, Path, str]]:
    """What the calls of a function give for these parameters of it; a call by keyword may go through a dispatcher."""
    function = function_around(path)
    taken = parameters_of(function) if isinstance(function, ast.FunctionDef) else []
    wanted = [name for name in taken if name in names]
    for file in files if wanted else ():
        for node, around in nodes_of(file):
            if not isinstance(node, ast.Call):
                continue
            yield from ((each.value, around, file) for each in node.keywords if each.arg in wanted)
            if isinstance(function, ast.FunctionDef) and callee(node) == function.name:
                shift = int(taken[:1] == ["self"])
                pairs = zip(taken[shift:], node.args, strict=False)
                yield from ((value, around, file) for name, value in pairs if name in wanted)


def _parts_of_value(key: ast.expr) -> Iterator[ast.AST]:
    """The parts of a key that are in its value as they are: not the index of a lookup, nor most arguments."""
    pending: list[ast.AST] = [key]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, ast.Call):
            pending += part.args if callee(part) in _CONVERSIONS else []
        elif not isinstance(part, ast.Subscript | ast.Attribute):
            pending.extend(ast.iter_child_nodes(part))


def _assigned(names: set[str], path: Path, file: str) -> Iterator[ast.expr]:
    """The values that variables of the same function are given."""
    function = function_around(path)
    for node, around in nodes_of(file):
        is_near = function in around if function is not None else function_around(around) is None
        if isinstance(node, ast.Assign) and is_near:
            yield from (node.value for target in node.targets if isinstance(target, ast.Name) and target.id in names)


def _counters(file: str, path: Path, files: list[str], *, strictly: bool) -> set[str]:
    """Variables that only go up: of a loop over numbers around a line, and those that a number is added to."""
    nodes = nodes_of(file)
    found = {
        ast.unparse(node.target)
        for node, _ in nodes
        if isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int)
    }
    for node, around in nodes:  # what starts again is no counter
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            in_loop = any(isinstance(each, LOOPS) for each in around)
            method = function_around(around) is not None and not Site(file, node, None, around).builds
            found -= {
                ast.unparse(each) for each in node.targets if in_loop or (method and isinstance(each, ast.Attribute))
            }
    return found | _loop_counter(path, nodes, files, strictly=strictly)


def _loop_counter(path: Path, nodes: list[tuple[ast.AST, Path]], files: list[str], *, strictly: bool) -> set[str]:
    """The variable of the outermost loop over numbers around a line; loops inside of it begin anew each time."""
    outer = next((node for node in path if isinstance(node, LOOPS)), None)
    function = function_around(path)
    if not isinstance(outer, ast.For) or not isinstance(outer.iter, ast.Call) or callee(outer.iter) not in _COUNTERS:
        return set()
    if isinstance(function, ast.FunctionDef) and _is_called_in_loop(function.name, files):
        return set()
    if strictly and _is_length(outer.iter, nodes):
        return set()
    return {ast.unparse(outer.target.elts[0] if isinstance(outer.target, ast.Tuple) else outer.target)}


def _is_length(numbers: ast.Call, nodes: list[tuple[ast.AST, Path]]) -> bool:
    """Whether numbers are the positions in some data: `range(len(data))`, `enumerate(data)`."""
    if callee(numbers) == "enumerate":
        return True
    names = {part.id for part in ast.walk(numbers) if isinstance(part, ast.Name)}
    values = [
        node.value
        for node, _ in nodes
        if isinstance(node, ast.Assign) and any(last_name(target) in names for target in node.targets)
    ]
    return any(_calls(value, "len") for value in (numbers, *values))


def _is_called_in_loop(name: str, files: list[str]) -> bool:
    return any(
        isinstance(node, ast.Call) and callee(node) == name and any(isinstance(each, LOOPS) for each in path)
        for file in files
        for node, path in nodes_of(file)
    )
