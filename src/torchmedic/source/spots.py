"""Lines of the user's code on a live stack, with their columns."""

from __future__ import annotations

import ast
from types import CodeType, FrameType
from typing import NamedTuple

from torchmedic.records import Location, Role
from torchmedic.source.live_frames import Frame, place, position_of
from torchmedic.source.user_code import is_user_file

_MAX_SPOTS = 30


class Place(NamedTuple):
    """A line of the user's."""

    file: str
    line: int


NOWHERE = Place("", 0)


class Spot(NamedTuple):
    """A place in the user's code, as Python gives it: bytes from 0."""

    file: str
    line: int
    column: int | None
    end_line: int | None
    end_column: int | None
    function: str

    def location(self, role: Role, label: str = "") -> Location:
        return place(role, self.file, self.line, label, self.column, self.end_column, self.end_line)


class Spots:
    """The expressions that running frames are evaluating; a place in the code is looked up once."""

    def __init__(self) -> None:
        self._known: dict[tuple[CodeType, int], Spot] = {}

    def at(self, frame: FrameType) -> Spot:
        code = frame.f_code
        key = (code, frame.f_lasti)
        found = self._known.get(key)
        if found is None:
            line, end_line, column, end_column = position_of(code, max(0, frame.f_lasti))
            found = Spot(code.co_filename, line or frame.f_lineno, column, end_line, end_column, code.co_name)
            self._known[key] = found
        return found


def spot_of_frame(frame: FrameType) -> Spot:
    """The expression that a running frame is evaluating."""
    return Spots().at(frame)


def user_spots(frame: FrameType | None) -> tuple[Spot, ...]:
    """The user's own lines at and above a frame, innermost first."""
    spots: list[Spot] = []
    while frame is not None and len(spots) < _MAX_SPOTS:
        if is_user_file(frame.f_code.co_filename):
            spots.append(spot_of_frame(frame))
        frame = frame.f_back
    return tuple(spots)


def spot_of_node(file: str, node: ast.expr | ast.stmt, function: str = "") -> Spot:
    """The place that a piece of syntax takes."""
    return Spot(file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, function)


def spot_of_traced(frame: Frame) -> Spot:
    """The expression that a frame of a traceback was evaluating."""
    node = frame.node or frame.statement
    if node is None:
        return Spot(frame.file, frame.line, None, None, None, frame.function)
    return spot_of_node(frame.file, node, frame.function)
