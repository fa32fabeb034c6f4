"""The line that a function of the user's returned from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """The code that runs when something is called: of a function, a method, or an object's `__call__`."""
    for candidate in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        code = getattr(getattr(candidate, "__func__", candidate), "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def with_return_line(code: CodeType | None, function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Call a function; its result, and the line that some code inside of it last returned from (0 if it did not)."""
    lines = [0]

    def note(frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and frame.f_code is code:
            lines.append(frame.f_lineno)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = function(*args)
    finally:
        sys.setprofile(before)
    return result, lines[-1]
