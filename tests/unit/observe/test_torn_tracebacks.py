"""Pieces of a traceback that Python had no memory to write as one, and what only looks like such."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import pytest

from torchmedic.observe.failures.hostile_exceptions import mend
from torchmedic.source.live_frames import frames_of


def raised(work: Callable[[], object]) -> BaseException:
    with pytest.raises((MemoryError, ValueError)) as caught:
        work()
    return caught.value


def functions(error: BaseException) -> list[str]:
    found, tb = [], error.__traceback__
    while tb is not None:
        found.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    return [name for name in found if name != "raised"]


def fill() -> None:
    raise MemoryError


def loop() -> None:
    raise MemoryError


def test_the_pieces_are_put_behind_each_other() -> None:
    """As Python leaves them: the lines of the user's in the context of another, with one in between that has none."""
    outer, bare, inner = raised(loop), MemoryError(), raised(fill)
    inner.__traceback__ = inner.__traceback__.tb_next if inner.__traceback__ else None
    outer.__context__, bare.__context__ = bare, inner
    mend(outer)
    assert functions(outer) == ["loop", "fill"]


def test_another_try_is_none() -> None:
    def again() -> None:
        try:
            fill()
        except MemoryError:
            loop()

    error = raised(again)
    mend(error)
    assert functions(error) == ["again", "loop"]


@pytest.mark.parametrize(("said", "pieces"), [("", ["loop", "fail"]), ("of the user's own", ["loop"])])
def test_only_python_itself_begins_anew_with_no_word(said: str, pieces: list[str]) -> None:
    def fail() -> None:
        raise ValueError

    def loop() -> None:
        raise MemoryError(*filter(None, [said]))

    error, first = raised(loop), raised(fail)
    first.__traceback__ = first.__traceback__.tb_next if first.__traceback__ else None
    error.__context__ = first
    mend(error)
    assert functions(error) == pieces


def test_an_instruction_without_a_line_is_of_the_function() -> None:
    """A handler of a signal may raise at any instruction."""

    def guarded() -> None:
        try:
            fill()
        finally:
            len("")

    tb = raised(guarded).__traceback__
    while tb is not None and tb.tb_frame.f_code is not guarded.__code__:
        tb = tb.tb_next
    assert tb is not None
    code = guarded.__code__
    lasti = 2 * next(at for at, (line, *_) in enumerate(code.co_positions()) if line is None)
    entry = TracebackType(None, tb.tb_frame, lasti, -1)
    assert entry.tb_lineno is None
    assert [frame.line for frame in frames_of(entry)] == [code.co_firstlineno]
