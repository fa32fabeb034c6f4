"""Values that the source shows: literals, names that are assigned once, defaults of options, simple arithmetic."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_MAX_DEPTH = 20


class Unknown(Exception):
    """The source does not show the value."""


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name: `DataLoader` for `torch.utils.data.DataLoader`."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def dotted(node: ast.AST) -> str:
    """The dotted name of a node, such as `torch.utils.data.DataLoader`; empty if it is not made of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


class Constants:
    """All assignments in several trees, by name, in any scope. A name with two different values is unknown."""

    def __init__(self, trees: Iterable[ast.AST], cores: int | None = None) -> None:
        self._cores = cores
        self._asked: list[str] = []
        self._assigned: dict[str, list[ast.expr | None]] = {}
        trees = list(trees)
        self._own = {
            node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        for tree in trees:
            for node in ast.walk(tree):
                self._take(node)

    def known(self, node: ast.expr | None) -> Any:
        """The value of an expression; None if the source does not show it."""
        try:
            return self.value(node)
        except Unknown:
            return None

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """The value of an expression. Raises Unknown if the source does not show it."""
        if node is None or depth > _MAX_DEPTH:
            raise Unknown
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return self._of_name(name, depth)
            case ast.Subscript(slice=ast.Constant(value=str(key))):
                return self._of_name(key, depth)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, depth)
            case ast.BoolOp(op=ast.Or(), values=values):  # os.cpu_count() or 1
                return next(filter(None, (self.value(each, depth + 1) for each in values)), 0)
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
                try:
                    return _OPERATORS[type(kind)](self._number(left, depth), self._number(right, depth))
                except ZeroDivisionError:
                    raise Unknown from None
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return [self.value(item, depth + 1) for item in items]
            case ast.Call():
                return self._of_call(node, depth)
        raise Unknown

    def expression(self, node: ast.expr | None) -> ast.expr | None:
        """The expression that a name stands for, if there is only one."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(node, ast.Name | ast.Attribute):
                break
            known = self._assigned.get(name_of(node), [])
            if len(known) != 1 or known[0] is None:
                break
            node = known[0]
        return node

    def _of_name(self, name: str, depth: int) -> Any:
        if name in self._asked:  # defined in terms of itself
            raise Unknown
        self._asked.append(name)
        try:
            values = [self.value(each, depth + 1) for each in self._assigned.get(name, [])]
        finally:
            self._asked.pop()
        if not values or any(value != values[0] for value in values):
            raise Unknown
        return values[0]

    def _number(self, node: ast.expr, depth: int) -> Any:
        value = self.value(node, depth + 1)
        if not isinstance(value, int | float):
            raise Unknown
        return value

    def _of_call(self, node: ast.Call, depth: int) -> Any:
        name, arguments = name_of(node.func), node.args
        if name == "cpu_count":
            return os.cpu_count()
        if name == "len" and arguments and name_of(arguments[0]) == "sched_getaffinity":
            return self._cores or os.cpu_count()
        if name in ("min", "max") and len(arguments) > 1:
            return (min if name == "min" else max)(self._number(each, depth) for each in arguments)
        if name == "int" and len(arguments) == 1:
            return int(self._number(arguments[0], depth))
        if name in ("get_context", "device") and arguments:
            return self.value(arguments[0], depth + 1)
        raise Unknown

    def _take(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._enter(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._enter(target, value)
            case ast.AugAssign(target=target) | ast.For(target=target) | ast.comprehension(target=target):
                self._enter(target, None)
            case ast.arguments():
                named = [*node.posonlyargs, *node.args]
                defaults = [None] * (len(named) - len(node.defaults)) + list(node.defaults)
                for argument, default in (
                    *zip(named, defaults, strict=True),
                    *zip(node.kwonlyargs, node.kw_defaults, strict=True),
                ):
                    if default is not None:
                        self._assigned.setdefault(argument.arg, []).append(default)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        self._assigned.setdefault(key.value, []).append(value)
            case ast.Call(func=ast.Attribute(attr="add_argument")):
                self._take_option(node)
            case ast.Call(keywords=keywords) if name_of(node) in self._own:
                for word in keywords:
                    if word.arg is not None:
                        self._enter(ast.Name(word.arg), word.value)

    def _enter(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name | ast.Attribute):
            # `self.workers = workers` adds nothing.
            if not (isinstance(value, ast.Name | ast.Attribute) and name_of(value) == name_of(target)):
                self._assigned.setdefault(name_of(target), []).append(value)
        elif isinstance(target, ast.Tuple | ast.List):
            values = (
                value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) else None
            )
            for number, item in enumerate(target.elts):
                self._enter(item, values[number] if values is not None else None)

    def _take_option(self, node: ast.Call) -> None:
        """Enter the default of `parser.add_argument("-j", "--num-workers", default=4)` as `num_workers`."""
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        long = next((word for word in words if word.startswith("--")), words[0] if words else "")
        named = given.get("dest")
        name = named.value if isinstance(named, ast.Constant) else long.lstrip("-").replace("-", "_")
        if name and isinstance(name, str):
            self._assigned.setdefault(name, []).append(given.get("default"))
