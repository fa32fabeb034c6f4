"""Whether the loops around the training loop have begun another turn since a holder was first seen to grow.

The user may drop at the end of an epoch what was collected in it, in ways that the source does not plainly show. That a
holder has outlived a turn of the loop over epochs says more than any line. The loops are known by their variables.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torchmedic.detect.trends.heap_growth import Growth
from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.syntax import nodes_in
from torchmedic.source.user_variables import locals_of

_MAX_HOLDERS = 256
_PLAIN = (int, str, float)

Place = tuple[str, int]  # the file and line of a loop
_first_turns: dict[tuple[Any, int], dict[Place, Any]] = {}  # by holder and the first step at which it was seen


def may_be_given_up(growth: Growth, frames: list[FrameType]) -> bool:
    """Whether a `for` loop around the innermost loop is still in the turn in which the holder was first seen to grow.

    Args:
        growth: The growth of the holder.
        frames: The user's frames that run, the innermost first.
    """
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
        is_module = frame.f_code.co_name == "<module>"
        variables = frame.f_globals if is_module or not around else dict(locals_of(frame))
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
