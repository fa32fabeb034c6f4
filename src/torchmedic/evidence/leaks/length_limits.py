"""Up to how many items the source lets a holder grow, where that number can be read: a limit may be too far away."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Site, Traffic, nodes_of
from torchmedic.observe.heap.walk import Held
from torchmedic.source.assignments import flat
from torchmedic.source.syntax import CALLABLES, nodes_in
from torchmedic.source.user_variables import locals_of

NO_LIMIT = sys.maxsize  # it is asked for, but not set
_MISSING = object()


class LengthLimit:
    """The numbers that the length of one holder is compared with, in the functions that fill and empty it."""

    def __init__(self, held: Held, traffic: Traffic, frames: Iterable[FrameType]) -> None:
        self._held = held
        self._name = HolderName(held)
        self._traffic = traffic
        self._frames = list(frames)

    def most(self) -> int | None:
        """The greatest of them; None where there is none, or one that cannot be read."""
        if self._held.most:
            return self._held.most
        found: list[int] = []
        for site in (*self._traffic.puts, *self._traffic.takes):
            for bound in self._bounds(site):
                value = self._value(bound, site)
                if value is None or value == math.inf:
                    value = NO_LIMIT
                if type(value) is not int:
                    return None
                found.append(value)
        return max(found, default=None)

    def governs(self, take: Site) -> bool:
        """Whether something is taken out only where the limit is exceeded."""
        return any(
            isinstance(node, ast.If | ast.While) and any(True for _ in self._name.at(take.path).bounds(node, take.path))
            for node in take.path
        )

    def is_off(self, take: Site) -> bool:
        """Whether something is taken out only where a setting says so, which does not, and which nobody changes."""
        for node in take.path:
            if isinstance(node, ast.If) and any(take.node in ast.walk(each) for each in node.body):
                for condition in node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]:
                    is_and = not isinstance(node.test, ast.BoolOp) or isinstance(node.test.op, ast.And)
                    if is_and and self._is_unset(condition, take):
                        return True
        return False

    def _is_unset(self, condition: ast.expr, take: Site) -> bool:
        """`if self.keep_last:` or `if self.keep_last is not None:`, where it is None."""
        match condition:
            case ast.Compare(left=setting, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                pass
            case _:
                setting = condition
        if not isinstance(setting, ast.Attribute) or self._value(setting, take) is not None:
            return False
        return all(Site(take.file, node, None, path).builds for node, path in _assigned(setting.attr, take.file))

    def _bounds(self, site: Site) -> Iterator[ast.expr]:
        """What the length is compared with in the branches around a line, and in those of its function."""
        function = next((node for node in reversed(site.path) if isinstance(node, CALLABLES)), None)
        inside = [*site.path, *nodes_in(function)]
        for node in dict.fromkeys(each for each in inside if isinstance(each, ast.If | ast.While)):
            yield from self._name.at(site.path).bounds(node, site.path)

    def _value(self, expression: ast.expr, site: Site) -> Any:
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                return _attribute(self._owner(), attribute)
            case ast.Name(id=name):
                default = _default(name, site)
                return self._variable(name, site.file) if default is _MISSING else default
        return _MISSING

    def _owner(self) -> Any:
        """The object that the holder is an attribute of."""
        names = self._held.name.split(".")[:-1]
        if not names or not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
            return _MISSING
        owner = self._variable(names[0], self._held.file)
        for name in names[1:]:
            owner = _attribute(owner, name)
        return owner

    def _variable(self, name: str, file: str) -> Any:
        for frame in self._frames:
            if frame.f_code.co_filename == file:
                known = dict(locals_of(frame))
                if name in known:
                    return known[name]
                if name in frame.f_globals:
                    return frame.f_globals[name]
        return _MISSING


def _assigned(attribute: str, file: str) -> Iterator[tuple[ast.stmt, tuple[ast.AST, ...]]]:
    for node, path in nodes_of(file):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Attribute) and each.attr == attribute for each in flat(targets)):
                yield node, path


def _attribute(owner: Any, name: str) -> Any:
    attributes = getattr(owner, "__dict__", None)
    return attributes.get(name, _MISSING) if isinstance(attributes, dict) else _MISSING


def _default(name: str, site: Site) -> Any:
    """What an argument is if nobody says otherwise."""
    function = site.function
    if not isinstance(function, ast.FunctionDef):
        return _MISSING
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    given = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    given |= {each.arg: value for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value}
    default = given.get(name)
    return default.value if isinstance(default, ast.Constant) else _MISSING
