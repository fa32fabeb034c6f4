"""The parts of both sides of an assignment or of a comparison."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_MAKERS = frozenset("list dict set deque OrderedDict Counter".split())


def sides(comparison: ast.Compare) -> list[ast.expr]:
    return [comparison.left, *comparison.comparators]


def terms(value: ast.expr) -> Iterator[ast.expr]:
    """The terms that are added and subtracted to make a number."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
        yield from terms(value.left)
        yield from terms(value.right)
    else:
        yield value


def is_blank(value: ast.expr) -> bool:
    """Whether it is a new container with nothing in it, or with nothing but such."""
    match value:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Dict(values=parts):
            return all(is_blank(each) for each in parts)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[]) if name in _MAKERS:
            return True
        case ast.Call(func=ast.Name(id="defaultdict") | ast.Attribute(attr="defaultdict")):
            return True
        case ast.Call(func=ast.Call(func=ast.Name(id="type")) | ast.Attribute(attr="__class__"), args=[], keywords=[]):
            return True  # `type(losses)()`
    return isinstance(value, ast.Constant)


def blanks(node: ast.AST) -> Iterator[tuple[str | None, ast.expr]]:
    """The new containers that a call of `update` hands out, each with its key where that stands there."""
    match node:
        case ast.Call(func=ast.Attribute(attr="update"), args=args, keywords=keywords):
            given = [(each.arg, each.value) for each in keywords]
            for each in args:
                if isinstance(each, ast.Dict):
                    given += [
                        (str(key.value) if isinstance(key, ast.Constant) else None, value)
                        for key, value in zip(each.keys, each.values, strict=True)
                    ]
                elif isinstance(each, ast.DictComp):
                    given.append((None, each.value))
            yield from ((key, value) for key, value in given if is_new(value))


def is_new(value: ast.expr) -> bool:
    return is_blank(value) and not isinstance(value, ast.Constant)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with what it is given: `a, b = b, a` is two assignments."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        match target, node.value:
            case (ast.Tuple() | ast.List(), ast.Tuple() | ast.List()) if len(target.elts) == len(node.value.elts):
                yield from zip(target.elts, node.value.elts, strict=True)
            case _:
                yield from ((each, node.value) for each in flat([target]))


def flat(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """The single targets of an assignment: `a`, `b` and `c` of `(a, b), *c = ...`."""
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from flat(target.elts)
        elif isinstance(target, ast.Starred):
            yield from flat([target.value])
        else:
            yield target
