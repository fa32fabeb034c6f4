"""Which file a thread waits for to go away: a lock file that is asked for in a loop, with a sleep in between.

Of the user's own loops it is the path that the loop itself tests (`os.path.exists(path)`, `os.open(path, O_EXCL)`), of
a library's (filelock, torch's file baton) one that its frame holds and that is named as a lock.
"""

from __future__ import annotations

import ast
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType
from typing import Any

from torchmedic.observe.inside.peek import value_of
from torchmedic.records.inside import LockFile
from torchmedic.source.syntax import LOOPS, calls_in, innermost, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import locals_of

_TESTS = frozenset("exists lexists isfile is_file isdir is_dir access".split())
_MAKES = frozenset("mkdir makedirs symlink link touch symlink_to hardlink_to".split())
_PAUSES = frozenset("sleep wait".split())
_MAX_FRAMES = 8  # counted from the innermost
_MAX_CHARACTERS = 64  # characters of a file that holds a process number


def awaited_file(frames: list[FrameType]) -> LockFile | None:
    """The file that keeps the thread of these frames, innermost first, in a loop."""
    for frame in frames[:_MAX_FRAMES]:
        file = frame.f_code.co_filename
        if _PAUSES.isdisjoint(frame.f_code.co_names):
            continue  # most of them, and to parse a file takes its time
        loop = innermost(syntax_tree(file), frame.f_lineno, LOOPS)
        if loop is None or next(calls_in(loop, *_PAUSES), None) is None:
            continue
        paths = _tested(loop, frame) if is_user_file(file) else _named_as_lock(frame)
        for path in paths:
            found = _described(path, by_kernel=_is_kernel_lock(frame))
            if found is not None:
                return found
    return None


def _tested(loop: ast.AST, frame: FrameType) -> Iterator[str]:
    """The paths whose existence decides how a loop goes on."""
    calls = list(calls_in(loop, *_TESTS, *_MAKES))
    calls += [call for call in calls_in(loop, "open") if _is_exclusive(call)]
    known = dict(locals_of(frame))
    for call in calls:
        nodes = list(call.args)
        if isinstance(call.func, ast.Attribute):
            nodes.append(call.func.value)
        for node in nodes:
            yield from _path(value_of(node, frame, known))


def _is_exclusive(call: ast.Call) -> bool:
    """`open(path, "x")`, `os.open(path, os.O_CREAT | os.O_EXCL)`."""
    return any(
        (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("x"))
        or "O_EXCL" in (getattr(node, "attr", ""), getattr(node, "id", ""))
        for argument in [*call.args[1:], *(word.value for word in call.keywords)]
        for node in ast.walk(argument)
    )


def _named_as_lock(frame: FrameType) -> Iterator[str]:
    known = dict(locals_of(frame))
    values = [value for name, value in known.items() if name != "self"]
    with contextlib.suppress(AttributeError):
        values += list(object.__getattribute__(known.get("self"), "__dict__").values())
    for value in values:
        for path in _path(value):
            if "lock" in os.path.basename(path).lower():
                yield path


def _is_kernel_lock(frame: FrameType) -> bool:
    """Whether a lock on the file is awaited, not the file itself."""
    known = dict(locals_of(frame))
    return any(kind.__name__ == "UnixFileLock" for kind in type(known.get("self")).__mro__)


def _path(value: Any) -> Iterator[str]:
    if type(value) is str or isinstance(value, PurePath):
        yield str(value)


def _described(path: str, *, by_kernel: bool) -> LockFile | None:
    with contextlib.suppress(OSError, ValueError):
        made = os.stat(path).st_mtime
        writer = _number_in(path)
        return LockFile(
            path=os.path.abspath(path),
            age=max(0.0, time.time() - made),
            writer=writer,
            writer_lives=writer is not None and os.path.exists(f"/proc/{writer}"),
            by_kernel=by_kernel,
        )
    return None


def _number_in(path: str) -> int | None:
    """The process that a lock file names, if its first word is a number."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return int(file.read(_MAX_CHARACTERS).split()[0])
    return None
