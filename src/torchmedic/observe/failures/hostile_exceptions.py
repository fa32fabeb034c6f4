"""Exceptions that cannot be read as they are: their own methods raise, or their traceback is torn.

An examination reads texts, attributes and classes in many places, and `__str__`, `__getattribute__` and `__class__` of
the user's may raise anything. So it is given a stand-in for such an exception: an exception with the same name, the
same built-in base and the same traceback, and no code of the user's in it.

Each frame that an exception leaves is noted in an object of its own. If there is no memory for that, Python begins
anew with another MemoryError, whose context is the first: the lines that matter are in one piece, the loop in another.
"""

from __future__ import annotations

from types import FrameType, TracebackType
from typing import Any

from torchmedic.contained import text_of

_MAX_CHAIN = 50
# The slots of every exception, which no method of the user's can hide.
_SLOTS: dict[str, Any] = {name: BaseException.__dict__[name] for name in ("__traceback__", "__cause__", "__context__")}


def traceback_of(error: BaseException) -> TracebackType | None:
    found: TracebackType | None = _SLOTS["__traceback__"].__get__(error)
    return found


def set_traceback(error: BaseException, tb: TracebackType | None) -> None:
    _SLOTS["__traceback__"].__set__(error, tb)


def next_in_chain(error: BaseException) -> BaseException | None:
    """The cause of an exception, or else the exception that was handled when it was raised."""
    found: BaseException | None = _SLOTS["__cause__"].__get__(error)
    return found if found is not None else _SLOTS["__context__"].__get__(error)


def examinable(error: BaseException) -> BaseException:
    """The exception itself, or a stand-in where it or one in its chain cannot be asked anything."""
    chain: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if chain is None:
            return error
        if not _answers(chain):
            return _stand_in(error, 0)
        chain = next_in_chain(chain)
    return error


def _answers(error: BaseException) -> bool:
    kind = type(error)
    if kind.__module__ == "builtins":
        return True
    try:
        str(error), repr(error), hash(error), bool(error), error == error  # noqa: PLR0124 - each may raise
        return issubclass(error.__class__, BaseException) and getattr(error, "torchmedic_asks", None) is None
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False


def _stand_in(error: BaseException, depth: int) -> BaseException:
    kind = type(error)
    base = next(each for each in type.mro(kind) if each.__module__ == "builtins")
    copy: BaseException = type(kind.__name__, (base,), {"__module__": kind.__module__})()
    copy.args = (text_of(error),)
    set_traceback(copy, traceback_of(error))
    for name in ("__cause__", "__context__"):
        inner = _SLOTS[name].__get__(error)
        if inner is not None and depth < _MAX_CHAIN:
            _SLOTS[name].__set__(copy, _stand_in(inner, depth + 1))
    return copy


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
