"""Whether a dict that is filled by key may fill up: its keys are names of something, or they count without end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torchmedic.evidence.leaks.source.sites import Site, functions_of, nodes_of
from torchmedic.observe.heap.walk import Held
from torchmedic.source.assignments import assigned
from torchmedic.source.syntax import CALLABLES, LOOPS, callee

_BY_KEY = ("setdefault", "update", "__setitem__")
_COUNTING = ("range", "enumerate", "count")
_BOUNDED = (ast.Mod, ast.BitAnd)
# What comes out of these is another value every time.
_NEW = frozenset(
    "random uniform gauss normalvariate time time_ns perf_counter monotonic now uuid1 uuid4 token_hex".split()
)
_WRITING = frozenset({"str", "repr", "int", "float", "tuple", "format"})  # a number stays the number that it is
_DEPTH = 2  # calls and assignments that a key is followed through


def key_of(site: Site) -> ast.expr | None:
    """The key under which a line stores; None where it only adds at the end."""
    node: Any = site.node
    match node:
        case ast.Assign(targets=[ast.Subscript(slice=key) as target, *_], value=value):
            return key if not _adds_to(target, value) else None
        case ast.Call(func=ast.Attribute(attr=method), args=[first, *_]) if method in _BY_KEY:
            return first
    return None


def _adds_to(target: ast.Subscript, value: ast.expr) -> bool:
    """Whether what is there under a key only gets longer: `kept[name] = kept[name] + [loss]`, `[*kept[name], loss]`."""
    added = [value.left, value.right] if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else [value]
    if not any(isinstance(each, ast.List | ast.Tuple) for each in added):
        return False  # a number, or a tensor that is made anew
    itself = (ast.unparse(target), f"{ast.unparse(target.value)}.get({ast.unparse(target.slice)}")
    parts = [part for part in ast.walk(value) if isinstance(part, ast.Subscript | ast.Call)]
    return any(ast.unparse(part).startswith(itself) for part in parts)


def counts(held: Held, site: Site, files: list[str]) -> bool:
    """Whether the key is another one every time, as far as the source shows it."""
    if held.keys:
        return True
    if held.via == "cache":
        return _is_called_with_counter(held, files, strictly=False)
    key = key_of(site)
    return key is None or _is_counter(key, site.path, site.file, files)


def never_returns(held: Held, site: Site, files: list[str]) -> bool:
    """Whether a key that was asked for once is never asked for again, so that what is kept for it is of no use."""
    if held.keys:
        return held.keys == "lost"
    if held.via == "cache":
        return _is_called_with_counter(held, files, strictly=True)
    key = key_of(site)
    return key is not None and _is_counter(key, site.path, site.file, files, strictly=True)


def is_bounded(site: Site) -> bool:
    """Whether the key is a remainder, of which there are so many and no more: `ring[step % size]`."""
    key = key_of(site)
    if isinstance(key, ast.Name):
        values = list(_assigned({key.id}, site.function, site.path, site.file))
        return bool(values) and all(_is_remainder(value) for value in values)
    return key is not None and _is_remainder(key)


def _is_remainder(value: ast.expr) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, _BOUNDED) and not _is_text(value.left)


def is_by_identity(site: Site) -> bool:
    """Whether the key is the `id` of an object, so that each new object has a new one."""
    key = key_of(site)
    if key is None:
        return False
    names = {part.id for part in ast.walk(key) if isinstance(part, ast.Name)}
    values = [key, *_assigned(names, site.function, site.path, site.file)]
    return any(isinstance(part, ast.Call) and callee(part) == "id" for value in values for part in ast.walk(value))


def _is_called_with_counter(held: Held, files: list[str], *, strictly: bool) -> bool:
    return any(
        _is_counter(argument, path, file, files, strictly=strictly)
        for file in files
        for node, path in nodes_of(file)
        if isinstance(node, ast.Call) and callee(node) == held.last
        for argument in node.args
    )


def _is_counter(
    key: ast.expr,
    path: tuple[ast.AST, ...],
    file: str,
    files: list[str],
    depth: int = _DEPTH,
    *,
    strictly: bool = False,
) -> bool:
    """Whether a key is made from a counter; `strictly` if it is one, and not only looked up by it."""
    parts = list(_made_of(key) if strictly else ast.walk(key))
    if any(isinstance(part, ast.BinOp) and _is_remainder(part) for part in parts):
        return False
    if any(isinstance(part, ast.Call) and (callee(part) in _NEW or _counts_on(part, files)) for part in parts):
        return True
    names = {ast.unparse(part) for part in parts if isinstance(part, ast.Name | ast.Attribute)}
    if not names.isdisjoint(_counters(file, path, files, strictly=strictly)):
        return True
    function = next((each for each in reversed(path) if isinstance(each, CALLABLES)), None)
    if not depth:
        return False
    for value in _assigned(names, function, path, file):
        if _is_counter(value, path, file, files, depth - 1, strictly=strictly):
            return True
    for value, inside, other in _returned(parts, files):
        if _is_counter(value, (inside,), other, files, depth - 1, strictly=strictly):
            return True
    return isinstance(function, ast.FunctionDef) and any(
        _is_counter(given, around, other, files, depth - 1, strictly=strictly)
        for given, around, other in _given(names, function, files)
    )


def _counts_on(call: ast.Call, files: list[str]) -> bool:
    """`next(numbers)`, where these are an `itertools.count()`."""
    if callee(call) != "next" or not call.args:
        return False
    name = ast.unparse(call.args[0]).rpartition(".")[2]
    for file in files:
        for node, _ in nodes_of(file):
            for target, value in assigned(node):
                is_count = isinstance(value, ast.Call) and ast.unparse(value.func) in ("count", "itertools.count")
                if is_count and ast.unparse(target).rpartition(".")[2] == name:
                    return True
    return False


def _made_of(key: ast.expr) -> Iterator[ast.AST]:
    """The parts of a key that are in its value as they are: not the index of a lookup, nor what a function is given."""
    pending: list[ast.AST] = [key]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, ast.Call):
            pending += part.args if callee(part) in _WRITING else []
        elif not isinstance(part, ast.Subscript | ast.Attribute):
            pending.extend(ast.iter_child_nodes(part))


def _assigned(names: set[str], function: ast.AST | None, path: tuple[ast.AST, ...], file: str) -> Iterator[ast.expr]:
    """What variables of the same function are given."""
    for node, around in nodes_of(file):
        if isinstance(node, ast.Assign) and (function in around if function is not None else not _function(around)):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id in names:
                    yield node.value


def _returned(parts: list[ast.AST], files: list[str]) -> Iterator[tuple[ast.expr, ast.FunctionDef, str]]:
    """What functions of the user's give back that are called in a key: `self.results[self.next_name()]`."""
    for part in parts:
        if isinstance(part, ast.Call):
            for file, function in functions_of(callee(part), files):
                for node in ast.walk(function):
                    if isinstance(node, ast.Return) and node.value is not None:
                        yield node.value, function, file


def _function(path: tuple[ast.AST, ...]) -> ast.AST | None:
    return next((each for each in reversed(path) if isinstance(each, CALLABLES)), None)


def _given(
    names: set[str], function: ast.FunctionDef, files: list[str]
) -> Iterator[tuple[ast.expr, tuple[ast.AST, ...], str]]:
    """What calls of a function hand to those of its arguments."""
    parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    wanted = [parameters.index(name) for name in names if name in parameters]
    method = parameters[:1] in (["self"], ["cls"])
    for other in files if wanted else ():
        for node, around in nodes_of(other):
            if isinstance(node, ast.Call) and _calls(node, function, files):
                for number in wanted:
                    at = number - method
                    given = node.args[at] if 0 <= at < len(node.args) else None
                    given = given or next(
                        (each.value for each in node.keywords if each.arg == parameters[number]), None
                    )
                    if given is not None:
                        yield given, around, other


def _calls(call: ast.Call, function: ast.FunctionDef, files: list[str]) -> bool:
    name = callee(call)
    if function.name in ("forward", "__call__"):
        return next(functions_of(name, files), None) is None  # by the object that it is a method of
    return name == function.name


def _counters(file: str, path: tuple[ast.AST, ...], files: list[str], *, strictly: bool) -> set[str]:
    """Variables that only ever go up: of a loop over numbers around a line, and those that something is added to."""
    nodes = nodes_of(file)
    found = {
        ast.unparse(node.target)
        for node, _ in nodes
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_number(node.value)
    }
    for node, around in nodes:  # what starts again is no counter
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            in_loop = any(isinstance(each, LOOPS) for each in around)
            method = _function(around) is not None and not Site(file, node, None, around).builds
            found -= {
                ast.unparse(each) for each in node.targets if in_loop or (method and isinstance(each, ast.Attribute))
            }
    loops = [node for node in path if isinstance(node, LOOPS)]
    function = _function(path)
    if loops and not (isinstance(function, ast.FunctionDef) and _is_called_in_loop(function.name, files)):
        outer = loops[0]  # those inside of it begin anew each time
        if isinstance(outer, ast.For) and isinstance(outer.iter, ast.Call) and callee(outer.iter) in _COUNTING:
            target = outer.target.elts[0] if isinstance(outer.target, ast.Tuple) else outer.target
            if not (strictly and _is_length(outer.iter, nodes)):
                found.add(ast.unparse(target))
    return found


def _is_length(numbers: ast.Call, nodes: list[tuple[ast.AST, tuple[ast.AST, ...]]]) -> bool:
    """Whether they are the places of something that has so many: `range(len(data))`, `enumerate(data)`."""
    if callee(numbers) == "enumerate":
        return True
    names = {part.id for part in ast.walk(numbers) if isinstance(part, ast.Name)}
    values = [numbers, *(node.value for node, _ in nodes if isinstance(node, ast.Assign) and _targets(node) & names)]
    return any(isinstance(part, ast.Call) and callee(part) == "len" for value in values for part in ast.walk(value))


def _targets(node: ast.Assign) -> set[str]:
    return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def _is_called_in_loop(name: str, files: list[str]) -> bool:
    for file in files:
        for node, path in nodes_of(file):
            if isinstance(node, ast.Call) and callee(node) == name and any(isinstance(each, LOOPS) for each in path):
                return True
    return False


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int)
