"""The loop that a thread goes round in, and whether anything that could end it changes."""

from __future__ import annotations

import ast
from types import FrameType
from typing import Any, NamedTuple

from torchmedic.observe.frames import is_user_file
from torchmedic.observe.inside.peek import MISSING, fingerprint, shown, tree_of, value_of, variables
from torchmedic.stall_records import LoopView

Loop = ast.While | ast.For

_PURE = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Subscript)
_SMALL_PARTS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


class Place(NamedTuple):
    """Where one frame of a thread stood at one look."""

    frame: int
    file: str
    line: int
    lasti: int


class Look(NamedTuple):
    """A thread at one moment: its frames, the outermost first, and what the loop's condition read."""

    places: tuple[Place, ...]
    prints: dict[str, str]


def places_of(frames: list[FrameType]) -> tuple[Place, ...]:
    """Of frames given innermost first."""
    return tuple(
        Place(id(frame), frame.f_code.co_filename, frame.f_lineno, frame.f_lasti) for frame in reversed(frames)
    )


def prints_of(frames: list[FrameType]) -> dict[str, str]:
    """Fingerprints of what the conditions of all loops read that these frames are in."""
    found: dict[str, str] = {}
    for frame in frames:
        loops = _loops_around(frame.f_code.co_filename, frame.f_lineno)
        if not loops:
            continue
        with variables(frame) as known:
            for loop in loops:
                for text, node in read_by(loop).items():
                    value = value_of(node, frame, known)
                    if value is not MISSING:
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


def read_by(loop: Loop) -> dict[str, ast.expr]:
    """What decides whether a loop ends, by its text; empty where a call has a say in it, whose answer is not known."""
    tests = [loop.test] if isinstance(loop, ast.While) else []
    tests += [branch.test for branch in _ways_out(loop)]
    found: dict[str, ast.expr] = {}
    for test in tests:
        for node in ast.walk(test):
            if not isinstance(node, _PURE + _SMALL_PARTS):
                return {}
            if isinstance(node, ast.Name | ast.Attribute):
                found[ast.unparse(node)] = node
    return found


def _described(loop: Loop, frame: FrameType, looks: list[Look]) -> LoopView:
    wanted = read_by(loop)
    prints = {text: {look.prints.get(f"{id(frame)}:{text}", "") for look in looks} for text in wanted}
    same = [text for text, seen in prints.items() if len(seen) == 1 and "" not in seen]
    settled = bool(wanted) and len(same) == len(wanted)
    values: tuple[str, ...] = ()
    with variables(frame) as known:
        if settled:
            values = tuple(shown(value_of(wanted[text], frame, known)) for text in same)
        empty = isinstance(loop, ast.For) and _is_empty(value_of(loop.iter, frame, known))
    head = loop.test if isinstance(loop, ast.While) else loop.iter
    return LoopView(
        file=frame.f_code.co_filename,
        line=loop.lineno,
        end_line=loop.end_lineno or loop.lineno,
        code=ast.unparse(head),
        kind="while" if isinstance(loop, ast.While) else "for",
        endless=_has_no_way_out(loop),
        unchanged=tuple(same) if settled else (),
        values=values,
        iterates=ast.unparse(loop.iter) if isinstance(loop, ast.For) else "",
        empty_iterable=empty,
    )


def _is_empty(value: Any) -> bool:
    return type(value) in (list, tuple, dict, set, range, str) and len(value) == 0


def _loops_around(file: str, *lines: int) -> list[Loop]:
    """The loops whose body or head holds all these lines, the innermost first."""
    tree = tree_of(file) if is_user_file(file) else None
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
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and all(node.lineno <= line <= (node.end_lineno or 0) for line in lines)
        and not isinstance(node, ast.Lambda)
        for node in ast.walk(loop)
    )


def _ways_out(loop: Loop) -> list[ast.If]:
    """The branches of a loop that leave it."""
    return [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.If)
        and any(_leaves(inner, loop) for part in node.body + node.orelse for inner in ast.walk(part))
    ]


def _leaves(node: ast.AST, loop: Loop) -> bool:
    return isinstance(node, ast.Return | ast.Raise) or (isinstance(node, ast.Break) and _loop_of(node, loop) is loop)


def _loop_of(wanted: ast.Break, loop: Loop) -> Loop | None:
    """Which loop a `break` ends."""
    owner: Loop = loop
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.While | ast.For)
            and node is not loop
            and any(each is wanted for each in ast.walk(node))
        ):
            owner = node
    return owner


def _has_no_way_out(loop: Loop) -> bool:
    """`while True` without `break`, `return`, `raise` or `yield`."""
    if not isinstance(loop, ast.While) or not (isinstance(loop.test, ast.Constant) and loop.test.value):
        return False
    return not any(
        isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) or _leaves(node, loop) for node in ast.walk(loop)
    )
