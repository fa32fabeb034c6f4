"""What loops call the items of a holder, or the holder itself where they go over several of its kind."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.source.syntax import COMPREHENSIONS, callee

_ALIKE = frozenset({"list", "tuple", "reversed", "sorted", "values"})  # what these give are the items themselves


def loop_names(name: HolderName, path: tuple[ast.AST, ...], *, is_item: bool) -> Iterator[str]:
    """The names that stand for a holder in the loops and comprehensions around a line.

    Args:
        name: The holder's.
        path: What stands around the line.
        is_item: Whether the holder is one of several, which a loop may go over: `for values in history.values():`.
    """
    for loop in path:
        if isinstance(loop, ast.For):
            yield from _names(name, loop.target, loop.iter, is_item=is_item)
        elif isinstance(loop, COMPREHENSIONS):
            for each in loop.generators:
                yield from _names(name, each.target, each.iter, is_item=is_item)


def _names(name: HolderName, target: ast.expr, source: ast.expr, *, is_item: bool) -> Iterator[str]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
    match source:
        case ast.Name() | ast.Attribute():
            is_meant = is_item and name.is_meant_by(source)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            is_meant = any(name.is_meant_by(each) for each in elements)  # `for each in (losses, scores):`
        case ast.Call(func=ast.Attribute(attr="items", value=whole)):
            is_meant, target = is_item and name.is_meant_by(whole), parts[-1] if parts else target
        case ast.Call(func=ast.Attribute(attr="values", value=whole)):
            is_meant = is_item and name.is_meant_by(whole)
        case ast.Call(args=[first, *_]) if callee(source) == "enumerate" and parts:
            yield from _names(name, parts[-1], first, is_item=is_item)
            return
        case ast.Call(args=args) if callee(source) == "zip":
            for part, each in zip(parts, args, strict=False):
                yield from _names(name, part, each, is_item=is_item)
            return
        case ast.Call(args=[first]) if callee(source) in _ALIKE:
            yield from _names(name, target, first, is_item=is_item)
            return
        case _:
            return
    if is_meant and isinstance(target, ast.Name):
        yield target.id
