"""How the source may write the name of a holder, and what it does to it there: put in, take out, start anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torchmedic.observe.holders import Held

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_ADDING = frozenset(
    "append extend appendleft extendleft insert add put put_nowait update setdefault push push_back enqueue "
    "__setitem__ add_param_group".split()
)
_STORING = frozenset("store record remember save log write register collect track cache send emit".split())
_PUSHING = frozenset("heappush insort insort_left insort_right".split())
_TAKING = frozenset("clear pop popleft popitem remove discard get_nowait".split())
_PICKING = frozenset("nlargest nsmallest islice sample choices deque".split())


class HolderName:
    """A holder's last identifier, as the source may write it."""

    def __init__(self, held: Held) -> None:
        self._last = held.last
        self._file = held.file
        self._local = held.local
        self._is_attribute = f".{held.last}" in re.split(r"(?=\.)", re.sub(r"\[.*?\]", "", held.name))

    def may_stand(self, file: str, path: tuple[ast.AST, ...]) -> bool:
        """Whether the name means this holder there."""
        if self._is_attribute:
            return True
        if file != self._file:
            return False
        if not self._local:
            return True
        return any(isinstance(node, FUNCTIONS) and first_line(node) == self._local for node in path)

    def _is(self, expression: ast.AST | None) -> bool:
        node: Any = expression
        while True:
            if isinstance(node, ast.Subscript):
                node = node.value
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("setdefault", "get")
            ):
                node = node.func.value
            else:
                break
        if isinstance(node, ast.Attribute):
            return node.attr == self._last
        return isinstance(node, ast.Name) and node.id == self._last and not self._is_attribute

    def is_meant_by(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name | ast.Attribute) and self._is(node)

    def puts(self, node: ast.AST) -> Iterator[ast.expr | None]:
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method in _ADDING and self._is(owner):
                yield node.args[-1] if node.args else None
            case ast.Call(args=[first, *rest]) if called(node) in _PUSHING and self._is(first):
                yield rest[-1] if rest else None
            case ast.AugAssign(target=target) if self._is(target):
                yield node.value
            case ast.Assign():
                for each, value in _assigned(node):
                    if isinstance(each, ast.Subscript) and not isinstance(each.slice, ast.Slice):
                        if self._is(each.value):
                            yield value
                    elif self._is(each) and self._reads(value):
                        yield value

    def stores(self, node: ast.AST) -> ast.expr | None:
        """What a method is given whose name says that it keeps it, where nothing else shows how that is done."""
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=owner), args=[*_, last]) if method in _STORING:
                return last if self._is(owner) else None
        return None

    def speaks_of(self, keys: frozenset[str], node: ast.AST) -> bool:
        """Whether a statement names one of the keys by which the holder is found, or none at all."""
        named = {
            part.slice.value
            for part in ast.walk(node)
            if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant) and self._is(part.value)
        }
        return not keys or not named or not keys.isdisjoint(map(str, named))

    def limits(self, line: int, path: tuple[ast.AST, ...]) -> bool:
        """Whether a line that fills it is passed only while it is short, or does so only after a look at its length."""
        if any(isinstance(node, ast.If) and self._compares_length(node.test) for node in path):
            return True
        body = next((node for node in reversed(path) if isinstance(node, FUNCTIONS)), None)
        return body is not None and any(
            isinstance(node, ast.If)
            and node.lineno < line
            and isinstance(node.body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)
            and self._compares_length(node.test)
            for node in ast.walk(body)
        )

    def _compares_length(self, test: ast.expr) -> bool:
        return any(
            isinstance(part, ast.Compare)
            and any(
                isinstance(side, ast.Call) and called(side) == "len" and side.args and self._is(side.args[0])
                for side in (part.left, *part.comparators)
            )
            for part in ast.walk(test)
        )

    def takes(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=owner)):
                return method in _TAKING and self._is(owner)
            case ast.Delete(targets=targets):
                return any(self._is(target) for target in targets)
            case ast.Assign():
                return any(
                    (self._is_plain(target) and self._slices(value))
                    or (
                        isinstance(target, ast.Subscript)
                        and isinstance(target.slice, ast.Slice)
                        and self._is(target.value)
                    )
                    for target, value in _assigned(node)
                )
        return False

    def starts(self, node: ast.AST) -> ast.expr | None:
        """The value of an assignment that forgets what was there."""
        if isinstance(node, ast.Assign):
            for target, value in _assigned(node):
                if self._is_plain(target) and not self._reads(value):
                    return value
        if isinstance(node, ast.AnnAssign) and node.value is not None and self._is_plain(node.target):
            return node.value
        return None

    def _is_plain(self, target: ast.AST) -> bool:
        return not isinstance(target, ast.Subscript) and self._is(target)

    def _reads(self, value: ast.expr) -> bool:
        return any(
            self._is(part) and not isinstance(part, ast.Subscript | ast.Call)
            for part in ast.walk(value)
            if isinstance(part, ast.Name | ast.Attribute)
        )

    def _slices(self, value: ast.expr) -> bool:
        return any(
            (isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Slice) and self._reads(part.value))
            or (isinstance(part, ast.Call) and called(part) in _PICKING and self._reads(part))
            or (isinstance(part, ast.comprehension) and part.ifs and self._reads(part.iter))
            for part in ast.walk(value)
        )


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with what it is given: `a, b = b, a` is two assignments."""
    for target in node.targets:
        match target, node.value:
            case (ast.Tuple() | ast.List(), ast.Tuple() | ast.List()) if len(target.elts) == len(node.value.elts):
                yield from zip(target.elts, node.value.elts, strict=True)
            case _:
                yield from ((each, node.value) for each in flat([target]))


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def flat(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from flat(target.elts)
        else:
            yield target


def first_line(function: ast.AST) -> int:
    decorators = getattr(function, "decorator_list", [])
    return int(min([function.lineno, *(each.lineno for each in decorators)]))  # type: ignore[attr-defined]
