"""The frames around a failure: of a running step, or of an exception; with the expression that each is evaluating."""

from __future__ import annotations

import itertools
from types import CodeType, FrameType, TracebackType

# Frames with the line and column that each is at, innermost first.
Stack = list[tuple[FrameType, int, int | None]]
Position = tuple[int | None, int | None, int | None, int | None]
_UNKNOWN: Position = (None, None, None, None)


def stack_at(frame: FrameType | None) -> Stack:
    """A frame that is running, and those above it."""
    stack: Stack = []
    while frame is not None:
        stack.append((frame, *point_of(frame, frame.f_lasti, frame.f_lineno)))
        frame = frame.f_back
    return stack


def frames_of_traceback(tb: TracebackType | None, within: FrameType | None = None) -> Stack:
    """The frames that an exception came through, down to one of them."""
    entries: Stack = []
    while tb is not None:
        entries.append((tb.tb_frame, *point_of(tb.tb_frame, tb.tb_lasti, tb.tb_lineno)))
        tb = tb.tb_next if tb.tb_frame is not within else None
    return entries[::-1]


def stack_of_traceback(tb: TracebackType | None, within: FrameType | None = None) -> Stack:
    """The frames that an exception came through, and those above the frame that caught it."""
    entries = frames_of_traceback(tb, within)
    return entries + (stack_at(entries[-1][0].f_back) if entries else [])


def point_of(frame: FrameType, lasti: int, line: int) -> tuple[int, int | None]:
    """Line and column of the expression that a frame is evaluating."""
    start, _, column, _ = position_of(frame.f_code, lasti)
    return start or line, column


def position_of(code: CodeType, lasti: int) -> Position:
    """Line, end line, column and end column of an instruction (PEP 657), as far as Python knows them."""
    return next(itertools.islice(code.co_positions(), lasti // 2, None), _UNKNOWN) if lasti >= 0 else _UNKNOWN
