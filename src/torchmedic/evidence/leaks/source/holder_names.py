"""How the source may write the name of a holder, and what a statement does to it: add, take out, start anew."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

from torchmedic.observe.heap.walk import Held
from torchmedic.source.assignments import assigned, blanks, is_blank, is_new
from torchmedic.source.syntax import (
    ADDING_METHODS,
    CALLABLES,
    STORING_METHODS,
    TAKING_METHODS,
    Path,
    callee,
    first_line,
)

_FILE_WRITERS = frozenset({"save", "dump"})  # `torch.save(weights, buffer)`
_FIELD_REPLACERS = frozenset({"replace", "_replace", "evolve"})  # a copy of an object with some other fields
_SORTED_INSERTS = frozenset("heappush insort insort_left insort_right".split())


class HolderName:
    """The last identifier of a holder, as the source may write it."""

    def __init__(self, held: Held) -> None:
        self._last = held.last
        self._file = held.file
        self._local = held.local
        self._is_attribute = f".{held.last}" in re.split(r"(?=\.)", re.sub(r"\[.*?\]", "", held.name))
        self._owners = held.owners
        self._keys = frozenset(re.findall(r"\['([^']*)'\]", held.name))
        self._is_item = held.name.endswith("]")
        self._is_tensor = held.kind == "age"  # with a graph, which a write in place makes longer
        self._self_is_other = False  # `self` is an object of another class, with an attribute of the same name
        self._elsewhere: HolderName | None = None

    def at(self, path: Path) -> HolderName:
        """The name as it is to be read inside of the class around a statement, which may not be the owner's."""
        inside = next((node.name for node in reversed(path) if isinstance(node, ast.ClassDef)), "")
        if not inside or not self._owners or inside in self._owners:
            return self
        if self._elsewhere is None:
            self._elsewhere = copy.copy(self)
            self._elsewhere._self_is_other = True
        return self._elsewhere

    def may_stand(self, file: str, path: Path) -> bool:
        """Whether the name means this holder at a place: it is an attribute, or a variable that is visible there."""
        if self._is_attribute:
            return True
        if file != self._file:
            return False
        return not self._local or any(isinstance(node, CALLABLES) and first_line(node) == self._local for node in path)

    def matches(self, expression: ast.AST | None) -> bool:
        """Whether an expression is the holder, or an item of it: `kept`, `self.kept[0]`, `kept.setdefault(key, [])`."""
        node = _without_items(expression)
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not self._is_attribute and (self._local or is_own):
                return False  # a variable; one of a module may be written as an attribute of the module
            return node.attr == self._last and not (is_own and self._self_is_other)
        return isinstance(node, ast.Name) and node.id == self._last and not self._is_attribute

    def is_meant_by(self, node: ast.expr) -> bool:
        """Whether an expression is the holder as a whole."""
        return isinstance(node, ast.Name | ast.Attribute) and self.matches(node)

    def puts(self, node: ast.AST) -> Iterator[ast.expr | None]:
        """The values that a statement or call adds to the holder; None for a value that the source does not show."""
        if isinstance(node, ast.Call):
            yield from self._put_by_call(node)
        elif isinstance(node, ast.AugAssign) and self.matches(node.target):
            yield node.value
        elif isinstance(node, ast.Assign):
            for target, value in assigned(node):
                if isinstance(target, ast.Subscript) and (self._is_tensor or not isinstance(target.slice, ast.Slice)):
                    if self.matches(target.value):
                        yield value
                elif self.matches(target) and self._reads(value):
                    yield value

    def _put_by_call(self, call: ast.Call) -> Iterator[ast.expr | None]:
        name = callee(call)
        if name in ADDING_METHODS and isinstance(call.func, ast.Attribute) and self.matches(call.func.value):
            yield call.args[-1] if call.args else None
        elif self._is_tensor and _is_in_place(name) and self.matches(_written(call)):
            yield from [each for each in call.args if not isinstance(each, ast.Constant)][-1:]
        elif name in _SORTED_INSERTS and call.args and self.matches(call.args[0]):
            yield call.args[-1] if len(call.args) > 1 else None
        elif self._is_handed_on(call, ADDING_METHODS):
            yield None
        elif name in _FIELD_REPLACERS:
            yield from (each for each in self._fields(call) if not is_blank(each) and self._reads(each))

    def stores(self, node: ast.AST) -> ast.expr | None:
        """The argument of a method whose name alone says that the holder keeps it."""
        match node:
            case ast.Call(args=[first, second, *_]) if callee(node) in _FILE_WRITERS and self.is_meant_by(second):
                return first
            case ast.Call(func=ast.Attribute(attr=method, value=owner), args=[*_, last]) if method in STORING_METHODS:
                return last if self.matches(owner) else None
        return None

    def takes(self, node: ast.AST) -> bool:
        """Whether a statement or call takes something out of the holder."""
        match node:
            case ast.Call(args=[first, *_]) if callee(node) == "heappop" and self.matches(first):
                return True
            case ast.Call(keywords=[_, *_]) if callee(node) in _FIELD_REPLACERS:
                return any(is_blank(each) for each in self._fields(node))
            case ast.Call(func=ast.Attribute(attr=method, value=owner)):
                is_taken = method in TAKING_METHODS and self.matches(owner)
                return is_taken or self._is_handed_on(node, TAKING_METHODS)
            case ast.Delete(targets=targets):
                return any(self.matches(target) for target in targets)
            case ast.Assign():
                return any(self._is_shortened(target, value) for target, value in assigned(node))
        return False

    def drains(self, node: ast.AST, path: Path) -> bool:
        """Whether a loop empties a queue while it is not empty: `while not jobs.empty(): jobs.get()`."""
        match node:
            case ast.Call(func=ast.Attribute(attr="get", value=owner)) if self.matches(owner):
                tests = [test for loop in path if (test := getattr(loop, "test", None)) is not None]
                return any(
                    isinstance(part, ast.Attribute) and part.attr in ("empty", "qsize") and self.matches(part.value)
                    for test in tests
                    for part in ast.walk(test)
                )
        return False

    def starts(self, node: ast.AST) -> ast.expr | None:
        """The new value, where a statement or call makes the holder anew and forgets what was there."""
        if isinstance(node, ast.Assign):
            return next((value for target, value in assigned(node) if self._is_renewed(target, value)), None)
        if isinstance(node, ast.AnnAssign):
            return node.value if self._is_plain(node.target) else None
        if isinstance(node, ast.Call):
            return self._renewed_by_call(node)
        for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
            if item.optional_vars is not None and self._is_plain(item.optional_vars):
                return item.context_expr
        return None

    def _renewed_by_call(self, call: ast.Call) -> ast.expr | None:
        """`setattr(self, name, [])`, `history.update(loss=[])`."""
        match call:
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, key, value]) if self._is_attribute:
                is_other = self._self_is_other and getattr(owner, "id", "") == "self"
                may_be = not isinstance(key, ast.Constant) or key.value == self._last
                return value if is_new(value) and may_be and not is_other else None
        if not self._is_item or not self.matches(getattr(call.func, "value", None)):
            return None
        return next((new for key, new in blanks(call) if key is None or not self._keys or key in self._keys), None)

    def names_other_keys(self, node: ast.AST) -> bool:
        """Whether a statement names other keys than those by which the holder is found: `metrics['other']`."""
        named = {
            str(part.slice.value)
            for part in ast.walk(node)
            if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant) and self.matches(part.value)
        }
        return bool(self._keys) and not self._keys.issuperset(named)

    def _fields(self, call: ast.Call) -> Iterator[ast.expr]:
        """The values that a call gives to the attribute that the holder is."""
        yield from (each.value for each in call.keywords if self._is_attribute and each.arg == self._last)

    def _is_handed_on(self, call: ast.Call, methods: frozenset[str]) -> bool:
        """Whether a call is given a method of the holder to call later: `add_done_callback(tasks.discard)`."""
        given = [*call.args, *(each.value for each in call.keywords)]
        return any(
            isinstance(each, ast.Attribute) and each.attr in methods and self.matches(each.value) for each in given
        )

    def _is_renewed(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Subscript):  # `history[name] = []`
            is_item = self._is_item and not isinstance(target.slice, ast.Slice) and self.matches(target)
            return is_item and is_new(value) and not self.names_other_keys(target)
        return self.matches(target) and not self._reads(value)

    def _is_shortened(self, target: ast.expr, value: ast.expr) -> bool:
        """`kept = kept[-5:]`, `kept = [x for x in kept if x.is_new]`, `kept[:] = []`."""
        if isinstance(target, ast.Subscript):
            return isinstance(target.slice, ast.Slice) and self.matches(target.value)
        return self.matches(target) and any(
            (isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Slice) and self._reads(part.value))
            or (isinstance(part, ast.comprehension) and bool(part.ifs) and self._reads(part.iter))
            for part in ast.walk(value)
        )

    def _is_plain(self, target: ast.AST) -> bool:
        return not isinstance(target, ast.Subscript) and self.matches(target)

    def _reads(self, value: ast.expr) -> bool:
        """Whether a value is made from the holder; of `{name: [] for name in losses}` only the keys are."""
        made = value.value if isinstance(value, ast.DictComp) else getattr(value, "elt", None)
        if is_blank(value) or (made is not None and is_blank(made)):
            return False
        return any(isinstance(part, ast.Name | ast.Attribute) and self.matches(part) for part in ast.walk(value))


def _is_in_place(method: str) -> bool:
    """Whether a method of a tensor writes to the tensor itself, as `add_` does."""
    return method.endswith("_") and not method.endswith("__")


def _written(call: ast.Call) -> ast.expr | None:
    """The tensor that a chain of writes in place writes to: `mean` of `mean.mul_(0.9).add_(value)`."""
    func = call.func
    while isinstance(func, ast.Attribute):
        inner = func.value
        if not isinstance(inner, ast.Call) or not _is_in_place(callee(inner)):
            return inner
        func = inner.func
    return None


def _without_items(expression: ast.AST | None) -> ast.AST | None:
    """The container behind `x[0]`, `x.get(key)` and `x.setdefault(key, [])`."""
    node = expression
    while True:
        match node:
            case ast.Subscript(value=inner):
                node = inner
            case ast.Call(func=ast.Attribute(attr="setdefault" | "get", value=inner)):
                node = inner
            case _:
                return node
