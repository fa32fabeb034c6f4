"""How the source may write the name of a holder, and what it does to it there: put in, take out, start anew."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torchmedic.observe.holders import Held
from torchmedic.replay.counted_branches import counts_up_to

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_ADDING = frozenset(
    "append extend appendleft extendleft insert add put put_nowait update setdefault push push_back enqueue "
    "__setitem__ add_param_group".split()
)
_STORING = frozenset("store record remember save log write register collect track cache send emit".split())
_PUSHING = frozenset("heappush insort insort_left insort_right".split())
_TAKING = frozenset("clear pop popleft popitem remove discard get_nowait".split())
_POPPING = frozenset({"heappop"})
_PICKING = frozenset("nlargest nsmallest islice sample choices deque".split())


class HolderName:
    """A holder's last identifier, as the source may write it."""

    def __init__(self, held: Held) -> None:
        self._last = held.last
        self._file = held.file
        self._local = held.local
        self._is_attribute = f".{held.last}" in re.split(r"(?=\.)", re.sub(r"\[.*?\]", "", held.name))
        self._owners = held.owners
        self._is_others = False  # what `self` has under this name
        self._elsewhere: HolderName | None = None

    def at(self, path: tuple[ast.AST, ...]) -> HolderName:
        """The same where `self` may be of another class, which has an attribute of this name as well."""
        inside = next((node.name for node in reversed(path) if isinstance(node, ast.ClassDef)), "")
        if not inside or not self._owners or inside in self._owners:
            return self
        if self._elsewhere is None:
            self._elsewhere = copy.copy(self)
            self._elsewhere._is_others = True
        return self._elsewhere

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
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not self._is_attribute and (self._local or is_own):
                return False  # a variable, or a global one, which others may know as an attribute of its module
            return node.attr == self._last and not (is_own and self._is_others)
        return isinstance(node, ast.Name) and node.id == self._last and not self._is_attribute

    def is_meant_by(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name | ast.Attribute) and self._is(node)

    def puts(self, node: ast.AST) -> Iterator[ast.expr | None]:
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method in _ADDING and self._is(owner):
                yield node.args[-1] if node.args else None
            case ast.Call(args=[first, *rest]) if called(node) in _PUSHING and self._is(first):
                yield rest[-1] if rest else None
            case ast.Call() if self._hands_on(node, _ADDING):
                yield None
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
        """Whether a statement names no other keys than those by which the holder is found."""
        named = {
            part.slice.value
            for part in ast.walk(node)
            if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant) and self._is(part.value)
        }
        return not keys or not named or keys.issuperset(map(str, named))

    def limits(self, line: int, path: tuple[ast.AST, ...]) -> bool:
        """Whether a line that fills it is passed only while it is short, or does so only after a look at its length."""
        body = next((node for node in reversed(path) if isinstance(node, FUNCTIONS)), None)
        inside = list(ast.walk(body)) if body is not None else []
        rooms = {
            target.id
            for node in inside
            if isinstance(node, ast.Assign) and self._takes_length(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        rooms |= self._measures(path)
        if any(isinstance(node, ast.If | ast.While) and self._compares_length(node.test, rooms) for node in path):
            return True
        if any(isinstance(node, ast.If) and counts_up_to(node) is not None for node in path):
            return True
        return any(
            isinstance(node, ast.If)
            and node.lineno < line
            and isinstance(node.body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)
            and self._compares_length(node.test, rooms)
            for node in inside
        )

    def bounds(self, branch: ast.If | ast.While, path: tuple[ast.AST, ...]) -> Iterator[ast.expr]:
        """What the condition of a branch compares its length with, or a number of the same meaning."""
        known = self._measures(path)
        for part in ast.walk(branch.test):
            if isinstance(part, ast.Compare) and len(part.ops) == 1:
                left, right = _sides(part)
                if self._takes_length(left, known):
                    yield right
                elif self._takes_length(right, known):
                    yield left
        if isinstance(branch, ast.If) and branch in path and (most := counts_up_to(branch)) is not None:
            yield most

    def _measures(self, path: tuple[ast.AST, ...]) -> set[str]:
        """What tells its length in the class around: `len(self)`, `self.size`, `self.is_full()`."""
        found = set()
        for method in (each for owner in path if isinstance(owner, ast.ClassDef) for each in owner.body):
            if isinstance(method, ast.FunctionDef):
                returned = [node.value for node in ast.walk(method) if isinstance(node, ast.Return) and node.value]
                if returned and all(self._takes_length(each) for each in returned):
                    found.add("len(self)" if method.name == "__len__" else f"self.{method.name}")
                elif returned and all(self._compares_length(each, set()) for each in returned):
                    found.add(f"self.{method.name} says")
        return found

    def _compares_length(self, test: ast.expr, known: set[str]) -> bool:
        """Whether a condition is about its length, or about something known that was made from that."""
        return any(
            (isinstance(part, ast.Compare) and any(self._takes_length(side, known) for side in _sides(part)))
            or (isinstance(part, ast.Attribute) and f"{ast.unparse(part)} says" in known)
            for part in ast.walk(test)
        )

    def _takes_length(self, value: ast.expr, known: Iterable[str] = ()) -> bool:
        return any(
            (isinstance(part, ast.Call) and called(part) == "len" and part.args and self._is(part.args[0]))
            or ast.unparse(part).removesuffix("()") in known
            for part in _terms(value)
        )

    def takes(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(args=[first, *_]) if called(node) in _POPPING and self._is(first):
                return True
            case ast.Call(func=ast.Attribute(attr=method, value=owner)):
                return (method in _TAKING and self._is(owner)) or self._hands_on(node, _TAKING)
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

    def _hands_on(self, call: ast.Call, methods: frozenset[str]) -> bool:
        """Whether a call is given such a method, to be called later: `add_done_callback(tasks.discard)`."""
        given = [*call.args, *(each.value for each in call.keywords)]
        return any(isinstance(each, ast.Attribute) and each.attr in methods and self._is(each.value) for each in given)

    def starts(self, node: ast.AST) -> ast.expr | None:
        """The value of an assignment that forgets what was there."""
        if isinstance(node, ast.Assign):
            for target, value in _assigned(node):
                if self._is_plain(target) and not self._reads(value):
                    return value
        if isinstance(node, ast.AnnAssign) and node.value is not None and self._is_plain(node.target):
            return node.value
        for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
            if item.optional_vars is not None and self._is_plain(item.optional_vars):
                return item.context_expr
        return None

    def _is_plain(self, target: ast.AST) -> bool:
        return not isinstance(target, ast.Subscript) and self._is(target)

    def _reads(self, value: ast.expr) -> bool:
        made = value.value if isinstance(value, ast.DictComp) else getattr(value, "elt", None)
        if made is not None and _is_blank(made):
            return False  # of `{name: [] for name in losses}` only the keys are the same
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


def _sides(comparison: ast.Compare) -> list[ast.expr]:
    return [comparison.left, *comparison.comparators]


def _terms(value: ast.expr) -> Iterator[ast.expr]:
    """What is added and subtracted to make a number."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
        yield from _terms(value.left)
        yield from _terms(value.right)
    else:
        yield value


def _is_blank(value: ast.expr) -> bool:
    """Whether it is a new container with nothing in it."""
    match value:
        case ast.List(elts=[]) | ast.Dict(keys=[]) | ast.Call(func=ast.Name(id="list" | "dict" | "set"), args=[]):
            return True
    return isinstance(value, ast.Constant)


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
