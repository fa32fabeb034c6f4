"""How the source may write the name of a holder, and what it does to it there: put in, take out, start anew."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torchmedic.evidence.leaks.source.counted_branches import counts_up_to
from torchmedic.observe.heap.walk import Held
from torchmedic.source.assignments import assigned, blanks, is_blank, is_new, sides, terms
from torchmedic.source.syntax import CALLABLES, callee, first_line, nodes_in
from torchmedic.source.vocabulary import ADDING_METHODS, STORING_METHODS, TAKING_METHODS

_WRITING = frozenset({"save", "dump"})  # to a file, or to what is taken for one: `torch.save(weights, buffer)`
_RENEWING = frozenset({"replace", "_replace", "evolve"})  # an object by one that differs in some fields
_PUSHING = frozenset("heappush insort insort_left insort_right".split())
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
        self._keys = frozenset(re.findall(r"\['([^']*)'\]", held.name))
        self._is_item = held.name.endswith("]")
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
        return any(isinstance(node, CALLABLES) and first_line(node) == self._local for node in path)

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

    def is_given_by(self, node: ast.expr) -> bool:
        """Whether an expression is the holder, or an item of a container that leads to it: `state = self.state[p]`."""
        return self.is_meant_by(node) or (self._is_item and isinstance(node, ast.Subscript) and self._is(node))

    def drains(self, node: ast.AST, path: tuple[ast.AST, ...]) -> bool:
        """Whether a loop empties a queue, as long as there is more: `while not jobs.empty(): jobs.get()`."""
        match node:
            case ast.Call(func=ast.Attribute(attr="get", value=owner)) if self._is(owner):
                asked = [part for loop in path for part in ast.walk(getattr(loop, "test", None) or ast.Pass())]
                return any(
                    isinstance(part, ast.Attribute) and part.attr in ("empty", "qsize") and self._is(part.value)
                    for part in asked
                )
        return False

    def puts(self, node: ast.AST) -> Iterator[ast.expr | None]:
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method in ADDING_METHODS and self._is(owner):
                yield node.args[-1] if node.args else None
            case ast.Call(args=[first, *rest]) if callee(node) in _PUSHING and self._is(first):
                yield rest[-1] if rest else None
            case ast.Call() if self._hands_on(node, ADDING_METHODS):
                yield None
            case ast.Call(keywords=[_, *_]) if callee(node) in _RENEWING:
                yield from (each for each in self._fields(node) if not is_blank(each) and self._reads(each))
            case ast.AugAssign(target=target) if self._is(target):
                yield node.value
            case ast.Assign():
                for each, value in assigned(node):
                    if isinstance(each, ast.Subscript) and not isinstance(each.slice, ast.Slice):
                        if self._is(each.value):
                            yield value
                    elif self._is(each) and self._reads(value):
                        yield value

    def stores(self, node: ast.AST) -> ast.expr | None:
        """What a method is given whose name says that it keeps it, where nothing else shows how that is done."""
        match node:
            case ast.Call(args=[first, second, *_]) if callee(node) in _WRITING and self.is_meant_by(second):
                return first
            case ast.Call(func=ast.Attribute(attr=method, value=owner), args=[*_, last]) if method in STORING_METHODS:
                return last if self._is(owner) else None
        return None

    def _fields(self, call: ast.Call) -> Iterator[ast.expr]:
        """What a call gives to the attribute that the holder is."""
        yield from (each.value for each in call.keywords if self._is_attribute and each.arg == self._last)

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
        body = next((node for node in reversed(path) if isinstance(node, CALLABLES)), None)
        inside = list(nodes_in(body))
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
                left, right = sides(part)
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
            (isinstance(part, ast.Compare) and any(self._takes_length(side, known) for side in sides(part)))
            or (isinstance(part, ast.Attribute) and f"{ast.unparse(part)} says" in known)
            for part in ast.walk(test)
        )

    def _takes_length(self, value: ast.expr, known: Iterable[str] = ()) -> bool:
        return any(
            (isinstance(part, ast.Call) and callee(part) == "len" and part.args and self._is(part.args[0]))
            or ast.unparse(part).removesuffix("()") in known
            for part in terms(value)
        )

    def takes(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(args=[first, *_]) if callee(node) in _POPPING and self._is(first):
                return True
            case ast.Call(keywords=[_, *_]) if callee(node) in _RENEWING:
                return any(is_blank(each) for each in self._fields(node))
            case ast.Call(func=ast.Attribute(attr=method, value=owner)):
                return (method in TAKING_METHODS and self._is(owner)) or self._hands_on(node, TAKING_METHODS)
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
                    for target, value in assigned(node)
                )
        return False

    def _hands_on(self, call: ast.Call, methods: frozenset[str]) -> bool:
        """Whether a call is given such a method, to be called later: `add_done_callback(tasks.discard)`."""
        given = [*call.args, *(each.value for each in call.keywords)]
        return any(isinstance(each, ast.Attribute) and each.attr in methods and self._is(each.value) for each in given)

    def starts(self, node: ast.AST) -> ast.expr | None:
        """The value of an assignment that forgets what was there."""
        if isinstance(node, ast.Assign):
            for target, value in assigned(node):
                if self._is_plain(target) and not self._reads(value):
                    return value
                if isinstance(target, ast.Subscript) and is_new(value) and self._is_key(target):
                    return value  # `history[name] = []`
        if isinstance(node, ast.AnnAssign) and node.value is not None and self._is_plain(node.target):
            return node.value
        match node:
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, key, value]) if self._is_attribute and is_new(
                value
            ):
                is_others = self._is_others and getattr(owner, "id", "") == "self"
                may_be = not isinstance(key, ast.Constant) or key.value == self._last
                return value if may_be and not is_others else None
        if self._is_item and isinstance(node, ast.Call) and self._is(getattr(node.func, "value", None)):
            return next((new for key, new in blanks(node) if key is None or not self._keys or key in self._keys), None)
        for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
            if item.optional_vars is not None and self._is_plain(item.optional_vars):
                return item.context_expr
        return None

    def _is_key(self, target: ast.Subscript) -> bool:
        """Whether it may be the very item of a container that the holder is."""
        is_slice = isinstance(target.slice, ast.Slice)
        return self._is_item and not is_slice and self._is(target) and self.speaks_of(self._keys, target)

    def _is_plain(self, target: ast.AST) -> bool:
        return not isinstance(target, ast.Subscript) and self._is(target)

    def _reads(self, value: ast.expr) -> bool:
        made = value.value if isinstance(value, ast.DictComp) else getattr(value, "elt", None)
        if is_blank(value) or (made is not None and is_blank(made)):
            return False  # of `{name: [] for name in losses}` only the keys are the same
        return any(
            self._is(part) and not isinstance(part, ast.Subscript | ast.Call)
            for part in ast.walk(value)
            if isinstance(part, ast.Name | ast.Attribute)
        )

    def _slices(self, value: ast.expr) -> bool:
        return any(
            (isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Slice) and self._reads(part.value))
            or (isinstance(part, ast.Call) and callee(part) in _PICKING and self._reads(part))
            or (isinstance(part, ast.comprehension) and part.ifs and self._reads(part.iter))
            for part in ast.walk(value)
        )
