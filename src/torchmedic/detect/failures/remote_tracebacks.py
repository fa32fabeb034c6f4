"""Exceptions that a child process raised and its parent raises again: a pool sends them, with the traceback as text."""

from __future__ import annotations

import re

from torchmedic.records import StackFrame

_REMOTE = ("RemoteTraceback", "_RemoteTraceback")  # of multiprocessing and of concurrent.futures
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def remote_frames(error: BaseException) -> list[StackFrame]:
    """The frames in the child process, outermost first; none if the exception was raised in this process."""
    cause = error.__cause__
    text = getattr(cause, "tb", None) if type(cause).__name__ in _REMOTE else None
    if not isinstance(text, str):
        return []
    return [StackFrame(file=match[1], line=int(match[2]), function=match[3]) for match in _FRAME.finditer(text)]
