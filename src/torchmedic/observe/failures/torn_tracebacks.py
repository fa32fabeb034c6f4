"""A traceback in one piece, where Python had no memory to write it in one.

Each frame that an exception leaves is noted in an object of its own. If there is no memory for that, Python begins
anew with another MemoryError, whose context is the first: the lines that matter are in one piece, the loop in another.
"""

from __future__ import annotations

from types import FrameType, TracebackType


def mend(error: BaseException) -> None:
    """Join the pieces of a traceback. What Python has printed already does not change."""
    pieces, inner = [error], error.__context__
    while _is_bare(pieces[-1]) and inner is not None and inner not in pieces:
        pieces.append(inner)
        inner = inner.__context__
    last = _last(error.__traceback__)
    known = frames(error)
    for piece in pieces[1:]:
        more = frames(piece)
        if last is None or known & more:
            return  # whoever handles an exception is noted in both: that is no piece, but another try
        if piece.__traceback__ is not None:
            known |= more
            last.tb_next = piece.__traceback__
            last = _last(last)


def frames(error: BaseException) -> set[FrameType]:
    found, tb = set(), error.__traceback__
    while tb is not None:
        found.add(tb.tb_frame)
        tb = tb.tb_next
    return found


def _is_bare(error: BaseException) -> bool:
    """Whether the interpreter itself has raised a MemoryError: without a message, and for no other exception."""
    return type(error) is MemoryError and not error.args and error.__cause__ is None


def _last(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb
