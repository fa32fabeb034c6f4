"""Whether a dict that is filled by key may fill up: its keys are names of something, or they count without end."""

from __future__ import annotations

import ast
from typing import Any

from torchmedic.observe.holders import Held
from torchmedic.replay.holder_names import called
from torchmedic.replay.sites import Site, functions_of, nodes_of

_BY_KEY = ("setdefault", "update", "__setitem__")
_COUNTING = ("range", "enumerate", "count")
_BOUNDED = (ast.Mod, ast.BitAnd)


def key_of(site: Site) -> ast.expr | None:
    """The key under which a line stores; None where it only adds at the end."""
    node: Any = site.node
    match node:
        case ast.Assign(targets=[ast.Subscript(slice=key), *_]):
            return key if isinstance(key, ast.expr) else None
        case ast.Call(func=ast.Attribute(attr=method), args=[first, *_]) if method in _BY_KEY:
            return first
    return None


def counts(held: Held, site: Site, files: list[str]) -> bool:
    """Whether the key is another one every time, as far as the source shows it."""
    if held.keys == "objects":
        return True
    if held.via == "cache":
        return any(
            _is_counter(argument, path, file, files)
            for file in files
            for node, path in nodes_of(file)
            if isinstance(node, ast.Call) and called(node) == held.last
            for argument in node.args
        )
    key = key_of(site)
    return key is None or _is_counter(key, site.path, site.file, files)


def _is_counter(key: ast.expr, path: tuple[ast.AST, ...], file: str, files: list[str], depth: int = 2) -> bool:
    if any(isinstance(part, _BOUNDED) for part in ast.walk(key)):
        return False
    names = {ast.unparse(part) for part in ast.walk(key) if isinstance(part, ast.Name | ast.Attribute)}
    if not names.isdisjoint(_counters(file, path)):
        return True
    function = next((each for each in reversed(path) if isinstance(each, ast.FunctionDef)), None)
    if function is None or not depth:
        return False
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
                    if given is not None and _is_counter(given, around, other, files, depth - 1):
                        return True
    return False


def _calls(call: ast.Call, function: ast.FunctionDef, files: list[str]) -> bool:
    name = called(call)
    if function.name in ("forward", "__call__"):
        return next(functions_of(name, files), None) is None  # by the object that it is a method of
    return name == function.name


def _counters(file: str, path: tuple[ast.AST, ...]) -> set[str]:
    """Variables that only ever go up: of a loop over numbers around a line, and those that something is added to."""
    found = {
        ast.unparse(node.target)
        for node, _ in nodes_of(file)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_number(node.value)
    }
    for node in path:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and called(node.iter) in _COUNTING:
            target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
            found.add(ast.unparse(target))
    return found


def _is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int)
