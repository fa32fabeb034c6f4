"""Whether the loops around the one that trains have begun another turn since a holder was there.

What is collected in one epoch may be given up at its end in ways that the source does not plainly show. That it has
outlived a turn of the loop over epochs says more than any line. The loops are known by their variables.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from torchmedic.detect.trends.heap_growth import Growth
from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.syntax import callee, nodes_in
from torchmedic.source.user_variables import locals_of

_MOST = 256  # holders
_PLAIN = (int, str, float)
_RANGES = ("range", "trange")
_ALL = 0.9
_BETWEEN_LOOKS = 8  # steps

Turns = dict[tuple[str, int], Any]
_first_turns: dict[tuple[Any, int], Turns] = {}  # by holder and the first step at which it was seen


class _Turn(NamedTuple):
    loop: ast.For | ast.While
    frame: FrameType
    value: Any  # of the variable of the loop, weakly, or its identity

    @property
    def place(self) -> tuple[str, int]:
        return self.frame.f_code.co_filename, self.loop.lineno


def may_be_given_up(growth: Growth, frames: list[FrameType]) -> bool:
    """Whether a loop around the innermost one has not yet come to its next turn while the holder grew.

    Args:
        growth: Of the holder.
        frames: Of the user's that run, the innermost first.
    """
    outer = [turn for turn in list(_turns(frames))[1:] if isinstance(turn.loop, ast.For)]
    if len(_first_turns) >= _MOST:
        _first_turns.clear()
    now = {turn.place: turn.value for turn in outer}
    first = _first_turns.setdefault((growth.key, growth.first.step), now)
    since_start = _is_since_start(growth)
    return any(
        _is_same(first.get(turn.place, turn.value), turn.value)
        and not (since_start and _is_later(turn))
        and not _is_only(turn)
        for turn in outer
    )


def _is_since_start(growth: Growth) -> bool:
    """Whether it has what all steps so far have put in, but for those of the last look."""
    amount = growth.periods if growth.what == "chain" else growth.held.size
    return amount >= growth.rate * (_ALL * growth.last.step - _BETWEEN_LOOKS)


def _turns(frames: list[FrameType]) -> Iterator[_Turn]:
    """The loops that run, the innermost first."""
    for frame in frames:
        tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
        line, begin = frame.f_lineno, frame.f_code.co_firstlineno
        around = [
            node
            for node in nodes_in(tree)
            if isinstance(node, ast.For | ast.While)
            and node.lineno >= begin
            and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        ]
        variables = _variables(frame) if around else {}
        for loop in sorted(around, key=lambda node: -node.lineno):
            target = loop.target if isinstance(loop, ast.For) else ast.Pass()
            value = variables.get(next((part.id for part in ast.walk(target) if isinstance(part, ast.Name)), ""))
            yield _Turn(loop, frame, _trace(value))


def _trace(value: Any) -> Any:
    """What tells a value from others later on, and does not keep it."""
    if type(value) in _PLAIN:
        return value
    try:
        return weakref.ref(value)  # while that lives, there is one for each object
    except TypeError:
        return id(value)


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (type(before) in _PLAIN and bool(before == now))


def _variables(frame: FrameType) -> dict[str, Any]:
    return frame.f_globals if frame.f_code.co_name == "<module>" else dict(locals_of(frame))


def _is_later(turn: _Turn) -> bool:
    """Whether a loop that counts is beyond its first turn."""
    start = _start(turn.loop.iter) if isinstance(turn.loop, ast.For) else None
    return start is not None and type(turn.value) is int and turn.value > start


def _start(numbers: ast.expr) -> int | None:
    """Where `range`, `enumerate` and the like begin to count, also inside of something that shows progress."""
    if not isinstance(numbers, ast.Call) or not numbers.args:
        return None
    name, args = callee(numbers), numbers.args
    if name not in (*_RANGES, "enumerate"):
        return _start(args[0])
    given = [each.value for each in numbers.keywords if each.arg == "start"]
    given += args[:-1] if name in _RANGES else args[1:]
    if not given:
        return 0
    return given[0].value if isinstance(given[0], ast.Constant) and type(given[0].value) is int else None


def _is_only(turn: _Turn) -> bool:
    """Whether a loop has one turn in all."""
    match getattr(turn.loop, "iter", None):
        case ast.Call(func=ast.Name(id="range" | "trange"), args=[ast.Constant(value=1)]):
            return True
        case ast.Call(func=ast.Name(id="range" | "trange"), args=[ast.Name(id=name)]):
            known = {**turn.frame.f_globals, **_variables(turn.frame)}
            return bool(known.get(name) == 1)
    return False
