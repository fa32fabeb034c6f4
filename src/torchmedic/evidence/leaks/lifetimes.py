"""How long a holder lives: it may belong to an object that is made anew, or to a function that is called again."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
from types import FrameType, ModuleType
from typing import Any

from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Site, nodes_of
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.observe.heap.walk import Held
from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.syntax import CALLABLES, COMPREHENSIONS, LOOPS, callee, first_line, nodes_in
from torchmedic.source.user_variables import locals_of

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_DEPTH = 2  # names that an owner is given in turn
_OWN = ("self", "cls")
_WIDE = 200  # attributes or keys that are looked at


class Lifetime:
    """Of one holder, by the functions that run at this moment, the innermost first, and the source."""

    def __init__(self, held: Held, frames: list[FrameType], files: list[str]) -> None:
        self._held = held
        self._frames = frames
        self._files = files

    @property
    def is_one_call(self) -> bool:
        """Whether it ends with a call: it is reached from a variable of a function that is called in a loop."""
        root = _names(self._held.name)[0]
        at = self._at(root)
        if at is None:
            return False if self._held.local else self._is_made_again()
        found, others = self._owner(root, at)
        if any(self._is_emptied(*other) for other in others if "." not in self._held.name):
            return True
        if found is None:
            return False
        code = self._frames[found].f_code
        if code.co_flags & _GENERATORS:  # a loop may well send to one and the same
            return _is_called_in_loop(code.co_name, self._files)
        return any(_is_in_loop(frame) for frame in self._frames[found + 1 :])

    def _at(self, root: str) -> int | None:
        """The function that runs and knows it by its name."""
        held = self._held
        for number, frame in enumerate(self._frames if root not in _OWN else ()):
            code = frame.f_code
            is_there = code.co_filename == held.file and held.local in (0, code.co_firstlineno)
            if is_there and root in (*code.co_varnames, *code.co_cellvars):
                return number
        return None

    def _owner(self, root: str, at: int) -> tuple[int | None, list[tuple[str, FrameType]]]:
        """The function that has made it, if any, and the names under which others know it, with their functions."""
        value = dict(locals_of(self._frames[at])).get(root)
        others: list[tuple[str, FrameType]] = []
        if value is None:
            return at, others
        # Of what was handed in, and is found nowhere else, an object may be old; a container is taken for a new one.
        owner = None if _is_given(root, self._frames[at]) and "." in self._held.name else at
        for number, frame in enumerate(self._frames[at + 1 :], at + 1):
            is_module = _is_module(frame)
            variables = list(frame.f_globals.items()) if is_module else locals_of(frame)
            ways = {name: way for name, each in variables if (way := _way(each, value)) is not None}
            others += [(f"{name}.{way}" if way else name, frame) for name, way in ways.items()]
            if ways and not is_module:
                own = [name for name in ways if not _is_given(name, frame)]
                owner = number if own else None if set(ways) & set(_OWN) else owner
            elif ways:
                owner = None
        return owner, others

    def _is_emptied(self, name: str, frame: FrameType) -> bool:
        """Whether that is done under another name."""
        code = frame.f_code
        local = code.co_firstlineno if code.co_name != "<module>" and "." not in name else 0
        other = self._held._replace(
            name=name, last=name.rpartition(".")[2], file=code.co_filename, local=local, owners=()
        )
        found = traffic(other, self._files)
        return bool(found.takes) or found.is_limited

    @property
    def has_passing_owner(self) -> bool:
        """Whether the object that it is an attribute of is made anew."""
        owners = _names(self._held.name)[:-1]
        if owners and not self._held.file and _is_called_in_loop(owners[0], self._files):
            return True  # an object that only its class is known of
        return self._passes(owners, _DEPTH)

    def _passes(self, owners: list[str], depth: int) -> bool:
        held = self._held
        for number, owner in enumerate(owners):
            if owner in _OWN:
                continue
            name = ".".join(owners[: number + 1])
            local = held.local if number == 0 else 0
            plain = held._replace(name=name, last=owner, local=local, via="", inner="", own="", owners=())
            for site in traffic(plain, self._files).takes:
                if site.value is None and re.search(rf"\b{owner}\[", held.name):
                    return True  # one of several, which go some time
                if site.value is not None:
                    other = _dotted(site.value)  # `stats = self.config.stats` makes nothing
                    if not other or other[0] == owner or not depth or self._passes(other, depth - 1):
                        return True
        return False

    def _is_made_again(self) -> bool:
        """Whether it is a variable of a function, kept by one that was made there, and a loop calls the former."""
        held, name = self._held, HolderName(self._held)
        if not held.file or "." in held.name:
            return False
        starts = [path for node, path in nodes_of(held.file) if name.starts(node) is not None]
        functions = [next((each for each in reversed(path) if isinstance(each, CALLABLES)), None) for path in starts]
        makers = [each for each in functions if isinstance(each, ast.FunctionDef) and not _is_global(held.last, each)]
        return len(makers) == len(starts) and any(_is_called_in_loop(each.name, self._files) for each in makers)


def is_last_line(site: Site, frames: list[FrameType]) -> bool:
    """Whether a line runs once at most while training goes on: in a function that runs, but in no loop, once."""
    function = site.function
    line = first_line(function) if function is not None else None
    for number, frame in enumerate(frames):
        code = frame.f_code
        if code.co_filename == site.file and (code.co_firstlineno == line or (line is None and _is_module(frame))):
            around = frames[number:]  # a library that calls the function may do so in a loop
            direct = all(inner.f_back is outer for inner, outer in itertools.pairwise(around))
            return direct and not site.loops and not any(_is_in_loop(outer) for outer in around[1:])
    return False


def _is_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>"


def _names(name: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", re.sub(r"\[.*?\]", "", name)) or [""]


def _is_given(name: str, frame: FrameType) -> bool:
    """Whether it is an argument, or a variable of a function around."""
    code = frame.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return name in arguments or name in code.co_freevars


def _way(thing: Any, value: Any) -> str | None:
    """The attribute by which a thing leads to a value; empty where it is that value or has it under a key."""
    if thing is value:
        return ""
    kind = type(thing)
    if kind is dict:
        return "" if any(each is value for each in list(thing.values())[:_WIDE]) else None
    with contextlib.suppress(AttributeError):  # not every object that may have one has it
        inside = object.__getattribute__(thing, "__dict__") if kind is not ModuleType else None
        if type(inside) is dict:
            return next((name for name, each in list(inside.items())[:_WIDE] if each is value), None)
    return None


def _dotted(value: ast.expr) -> list[str]:
    """The names of an expression that leads to an attribute; none for others."""
    names: list[str] = []
    node = value
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) and names else []


def _is_called_in_loop(name: str, files: list[str]) -> bool:
    """Whether a function, method or class of this name is called in a loop."""
    return any(
        isinstance(node, ast.Call)
        and callee(node) == name
        and any(isinstance(each, LOOPS) and not _is_header(node, each) for each in path)
        for file in files
        for node, path in nodes_of(file)
    )


def _is_in_loop(frame: FrameType) -> bool:
    """Whether the line that a frame is at stands in a loop."""
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    line = frame.f_lineno
    for node in nodes_in(tree):
        if isinstance(node, LOOPS) and node.lineno >= frame.f_code.co_firstlineno:
            if node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
                return True
        elif isinstance(node, COMPREHENSIONS) and _is_at(node, frame):
            return True
    return False


def _is_at(node: ast.expr, frame: FrameType) -> bool:
    """Whether the very call that a frame is at stands in an expression, and not only on its lines."""
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line, end_line, column, end_column = position
    if line is None or end_line is None or column is None or end_column is None:
        return node.lineno <= frame.f_lineno <= (node.end_lineno or 0)
    begins = (node.lineno, node.col_offset) <= (line, column)
    return begins and (end_line, end_column) <= (node.end_lineno or 0, node.end_col_offset or 0)


def _is_header(node: ast.AST, loop: LOOPS) -> bool:
    """Whether it stands in what a loop goes over, which is evaluated once."""
    return not isinstance(loop, ast.While) and any(part is node for part in ast.walk(loop.iter))


def _is_global(name: str, function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(function))
