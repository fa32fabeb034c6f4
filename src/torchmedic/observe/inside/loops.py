"""The loop that a thread goes round in, and whether anything that could end it changes."""

from __future__ import annotations

import ast
import itertools
import time
from types import FrameType
from typing import NamedTuple

from torchmedic.observe.inside.loop_exits import Loop, comparisons_of, exits_of, has_no_way_out
from torchmedic.observe.inside.peek import MISSING, fingerprint, is_opaque, shown, value_of
from torchmedic.records.inside import LoopView
from torchmedic.source.syntax import CALLABLES, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import locals_of

# What the exits of the last loop read that was looked at, and since when: an earlier question is long ago.
_SEEN: dict[tuple[int, str, int], tuple[tuple[str, ...], float]] = {}


class Place(NamedTuple):
    """The position of a frame of a thread at one look."""

    frame: int
    file: str
    line: int
    lasti: int


class Look(NamedTuple):
    """A thread at one moment: its frames, the outermost first, and what the loop's condition read."""

    places: tuple[Place, ...]
    prints: dict[str, str]


def places_of(frames: list[FrameType]) -> tuple[Place, ...]:
    """The places of frames that are given innermost first; the result is outermost first."""
    return tuple(
        Place(id(frame), frame.f_code.co_filename, frame.f_lineno, frame.f_lasti) for frame in reversed(frames)
    )


def prints_of(frames: list[FrameType]) -> dict[str, str]:
    """Fingerprints of what the conditions of all loops read that these frames are in."""
    found: dict[str, str] = {}
    for frame in frames:
        loops = _loops_around(frame.f_code.co_filename, frame.f_lineno)
        tree = syntax_tree(frame.f_code.co_filename) if loops else None
        if tree is None:
            continue
        known = dict(locals_of(frame))
        for loop in loops:
            exits = exits_of(loop, tree)
            for text, node in (exits.read | exits.guards).items():
                value = value_of(node, frame, known)
                if value is not MISSING and not is_opaque(value):
                    found[f"{id(frame)}:{text}"] = fingerprint(value)
    return found


def view(looks: list[Look], frames: list[FrameType]) -> LoopView | None:
    """The innermost loop of the user's that held the thread in all looks; `frames` are those of now."""
    if not looks:
        return None
    alive = {id(frame): frame for frame in frames}
    for depth in reversed(range(min(len(look.places) for look in looks))):
        column = [look.places[depth] for look in looks]
        if len({place.frame for place in column}) != 1 or not is_user_file(column[0].file):
            continue
        frame = alive.get(column[0].frame)
        lines = [place.line for place in column]
        loop = next(iter(_loops_around(column[0].file, *lines)), None)
        if frame is not None and loop is not None:
            return _described(loop, frame, looks)
    return None


def _described(loop: Loop, frame: FrameType, looks: list[Look]) -> LoopView:
    tree = syntax_tree(frame.f_code.co_filename)
    exits = exits_of(loop, tree) if tree is not None else None
    read = exits.read if exits is not None and exits.judged else {}
    same = bool(read) and all(_same(text, frame, looks) for text in read)
    known = dict(locals_of(frame))
    values = tuple(shown(value_of(node, frame, known)) for node in read.values()) if same else ()
    guarded = exits is not None and exits.guards_judged
    key = id(frame), frame.f_code.co_filename, loop.lineno
    prints = tuple(looks[-1].prints.get(f"{id(frame)}:{text}", "") for text in read) if same else ()
    seen, since = _SEEN.pop(key, ((), 0.0))
    _SEEN.clear()  # a thread is in one loop
    _SEEN[key] = prints, since if prints and prints == seen else time.monotonic()
    receding = _receding(loop, frame, looks)
    return LoopView(
        file=frame.f_code.co_filename,
        line=loop.lineno,
        end_line=loop.end_lineno or loop.lineno,
        code=ast.unparse(loop.test if isinstance(loop, ast.While) else loop.iter),
        kind="while" if isinstance(loop, ast.While) else "for",
        endless=has_no_way_out(loop),
        unchanged=tuple(read) if same else (),
        unchanged_for=time.monotonic() - _SEEN[key][1],
        values=values or tuple(receding.values()),
        hopeless=same and guarded and exits is not None and all(_same(text, frame, looks) for text in exits.guards),
        receding=tuple(receding),
    )


def _receding(loop: Loop, frame: FrameType, looks: list[Look]) -> dict[str, str]:
    """The last values of the numbers that exits compare, if in every look they were further apart than before."""
    found: dict[str, str] = {}
    for sides in comparisons_of(loop):
        course = [[_number(side, frame, look) for side in sides] for look in looks]
        gaps = [left - right for left, right in course if left is not None and right is not None]
        if len(gaps) < len(looks) or any(a * b <= 0 or abs(b) <= abs(a) for a, b in itertools.pairwise(gaps)):
            return {}
        names = [ast.unparse(side) for side in sides if not isinstance(side, ast.Constant)]
        found |= {name: looks[-1].prints[f"{id(frame)}:{name}"] for name in names}
    return found


def _number(side: ast.expr, frame: FrameType, look: Look) -> float | None:
    text = side.value if isinstance(side, ast.Constant) else look.prints.get(f"{id(frame)}:{ast.unparse(side)}")
    try:
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _same(text: str, frame: FrameType, looks: list[Look]) -> bool:
    """Whether something had one and the same value in all looks."""
    prints = {look.prints.get(f"{id(frame)}:{text}", "") for look in looks}
    return len(prints) == 1 and "" not in prints


def _loops_around(file: str, *lines: int) -> list[Loop]:
    """The loops whose body or head holds all these lines, the innermost first."""
    tree = syntax_tree(file) if is_user_file(file) else None
    if tree is None:
        return []
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.While | ast.For)
        and all(node.lineno <= line <= (node.body[-1].end_lineno or 0) for line in lines)
        and not _crosses_function(node, lines)
    ]
    return sorted(found, key=lambda node: (node.end_lineno or 0) - node.lineno)


def _crosses_function(loop: Loop, lines: tuple[int, ...]) -> bool:
    """Whether these lines belong to a function that is only defined in the loop."""
    return any(
        isinstance(node, CALLABLES)
        and all(node.lineno <= line <= (node.end_lineno or 0) for line in lines)
        and not isinstance(node, ast.Lambda)
        for node in ast.walk(loop)
    )
