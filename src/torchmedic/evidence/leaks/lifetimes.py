"""How long a holder lives: its object may be made anew, its function called again, its epoch end.

The user may drop at the end of an epoch what was collected in it, in ways that the source does not plainly show. That a
holder has outlived a turn of the loop over epochs says more than any line. The loops are known by their variables.
"""

from __future__ import annotations

import ast
import itertools
import re
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torchmedic.detect.trends.heap_growth import Growth
from torchmedic.evidence.leaks.source.sites import Site
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.observe.heap.walk import Held
from torchmedic.source.live_frames import position_of
from torchmedic.source.syntax import COMPREHENSIONS, LOOPS, first_line, is_module, nodes_in, syntax_tree
from torchmedic.source.user_variables import locals_of

_SELF = ("self", "cls")
_MAX_HOLDERS = 256
_PLAIN = (int, str, float)

Place = tuple[str, int]  # the file and line of a loop
_first_turns: dict[tuple[Any, int], dict[Place, Any]] = {}  # by holder and the first step at which it was seen


class Lifetime:
    """The life of one holder, by the functions that run at this moment, the innermost first, and the source."""

    def __init__(self, held: Held, frames: list[FrameType], files: list[str]) -> None:
        self._held = held
        self._frames = frames
        self._files = files

    @property
    def is_one_call(self) -> bool:
        """Whether it ends with a call: it is reached from a variable of a function that is called in a loop."""
        root = _names(self._held.name)[0]
        at = self._frame_with(root)
        if at is None:
            return False
        found, others = self._owner(root, at)
        if any(self._is_emptied(*other) for other in others if "." not in self._held.name):
            return True
        return found is not None and any(_is_in_loop(frame) for frame in self._frames[found + 1 :])

    def _frame_with(self, root: str) -> int | None:
        """The position of the running function that knows the holder by its name."""
        held = self._held
        for number, frame in enumerate(self._frames if root not in _SELF else ()):
            code = frame.f_code
            is_there = code.co_filename == held.file and held.local in (0, code.co_firstlineno)
            if is_there and root in (*code.co_varnames, *code.co_cellvars):
                return number
        return None

    def _owner(self, root: str, at: int) -> tuple[int | None, list[tuple[str, FrameType]]]:
        """The position of the function that has made it, if any, and its names in other functions that run."""
        value = dict(locals_of(self._frames[at])).get(root)
        others: list[tuple[str, FrameType]] = []
        if value is None:
            return at, others
        # Of what was handed in, and is found nowhere else, an object may be old; a container is taken for a new one.
        owner = None if _is_given(root, self._frames[at]) and "." in self._held.name else at
        for number, frame in enumerate(self._frames[at + 1 :], at + 1):
            at_top = is_module(frame.f_code)
            variables = list(frame.f_globals.items()) if at_top else locals_of(frame)
            names = [name for name, each in variables if each is value]
            others += [(name, frame) for name in names]
            if names and at_top:
                owner = None
            elif names:
                is_own = any(not _is_given(name, frame) for name in names)
                owner = number if is_own else None if set(names) & set(_SELF) else owner
        return owner, others

    def _is_emptied(self, name: str, frame: FrameType) -> bool:
        """Whether the source takes something out under the name that another function has for it."""
        code = frame.f_code
        local = code.co_firstlineno if not is_module(code) else 0
        found = traffic(
            self._held._replace(name=name, last=name, file=code.co_filename, local=local, owners=()), self._files
        )
        return bool(found.takes) or found.is_limited

    @property
    def has_passing_owner(self) -> bool:
        """Whether the object that has this attribute is made anew, or is one of several that are removed."""
        held, owners = self._held, _names(self._held.name)[:-1]
        for number, owner in enumerate(owners):
            if owner in _SELF:
                continue
            name, local = ".".join(owners[: number + 1]), held.local if number == 0 else 0
            plain = held._replace(name=name, last=owner, kind="items", local=local, via="", inner="", own="", owners=())
            is_one_of_several = re.search(rf"\b{owner}\[", held.name) is not None
            if any(site.value is not None or is_one_of_several for site in traffic(plain, self._files).takes):
                return True
        return False


def is_last_line(site: Site, frames: list[FrameType]) -> bool:
    """Whether a line runs once at most while training goes on: in a function that runs, but in no loop, once."""
    function = site.function
    line = first_line(function) if function is not None else None
    for number, frame in enumerate(frames):
        code = frame.f_code
        if code.co_filename == site.file and (code.co_firstlineno == line or (line is None and is_module(code))):
            around = frames[number:]  # a library that calls the function may do so in a loop
            direct = all(inner.f_back is outer for inner, outer in itertools.pairwise(around))
            return direct and not site.loops and not any(_is_in_loop(outer) for outer in around[1:])
    return False


def _names(name: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", re.sub(r"\[.*?\]", "", name)) or [""]


def _is_given(name: str, frame: FrameType) -> bool:
    """Whether a variable is an argument, or belongs to a function around."""
    code = frame.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return name in arguments or name in code.co_freevars


def _is_in_loop(frame: FrameType) -> bool:
    """Whether the line that a frame is at stands in a loop."""
    line = frame.f_lineno
    for node in nodes_in(syntax_tree(frame.f_code.co_filename, frame.f_globals)):
        if isinstance(node, LOOPS) and node.lineno >= frame.f_code.co_firstlineno:
            if node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
                return True
        elif isinstance(node, COMPREHENSIONS) and _is_at(node, frame):
            return True
    return False


def _is_at(node: ast.expr, frame: FrameType) -> bool:
    """Whether the very call that a frame is at stands in an expression, and not only on its lines."""
    line, end_line, column, end_column = position_of(frame.f_code, frame.f_lasti)
    if line is None or end_line is None or column is None or end_column is None:
        return node.lineno <= frame.f_lineno <= (node.end_lineno or 0)
    begins = (node.lineno, node.col_offset) <= (line, column)
    return begins and (end_line, end_column) <= (node.end_lineno or 0, node.end_col_offset or 0)


def may_be_given_up(growth: Growth, frames: list[FrameType]) -> bool:
    """Whether a `for` loop around the innermost one is still in the turn in which the holder was first seen to grow."""
    now = {place: value for loop, place, value in list(_turns(frames))[1:] if isinstance(loop, ast.For)}
    if len(_first_turns) >= _MAX_HOLDERS:
        _first_turns.clear()
    first = _first_turns.setdefault((growth.key, growth.first.step), now)
    return any(_is_same(first.get(place, value), value) for place, value in now.items())


def _turns(frames: list[FrameType]) -> Iterator[tuple[ast.For | ast.While, Place, Any]]:
    """The loops that run, the innermost first, each with its place and a trace of the value of its variable."""
    for frame in frames:
        line, begin = frame.f_lineno, frame.f_code.co_firstlineno
        around = [
            node
            for node in nodes_in(syntax_tree(frame.f_code.co_filename, frame.f_globals))
            if isinstance(node, ast.For | ast.While)
            and node.lineno >= begin
            and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        ]
        variables = frame.f_globals if is_module(frame.f_code) or not around else dict(locals_of(frame))
        for loop in sorted(around, key=lambda node: -node.lineno):
            target = loop.target if isinstance(loop, ast.For) else None
            name = next((part.id for part in nodes_in(target) if isinstance(part, ast.Name)), "")
            yield loop, (frame.f_code.co_filename, loop.lineno), _trace(variables.get(name))


def _trace(value: Any) -> Any:
    """A mark that tells a value from others later on, and does not keep it alive."""
    if type(value) in _PLAIN:
        return value
    try:
        return weakref.ref(value)  # while that lives, there is one for each object
    except TypeError:
        return id(value)


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (type(before) in _PLAIN and bool(before == now))
