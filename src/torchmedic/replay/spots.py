"""Lines of the user's code on a live stack, with their columns."""

from __future__ import annotations

import ast
from types import FrameType

from torchmedic.observe.frames import is_user_file
from torchmedic.replay.frames import Frame
from torchmedic.replay.operations import Spot, Spots

_DEPTH = 30


def spot_of_frame(frame: FrameType) -> Spot:
    """The expression that a running frame is evaluating."""
    return Spots().at(frame)


def user_spots(frame: FrameType | None) -> tuple[Spot, ...]:
    """The user's own lines at and above a frame, innermost first."""
    spots: list[Spot] = []
    while frame is not None and len(spots) < _DEPTH:
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
