"""Code of the user's, run line by line, to see which line made a bad value that was not bad before.

A bad value that was computed from another bad value comes from the line of that one. So a value that is bad on purpose,
or is repaired by a later line, is not blamed for another.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from torchmedic.source.lookup.line_accesses import NO_ACCESSES, Path, accesses_by_line, context_blocks
from torchmedic.source.objects.finite import is_bad
from torchmedic.source.user_code import is_user_file

_MAX_VALUES = 100_000  # of a container that is searched to its end


class Line(NamedTuple):
    """A line that gave a variable its first bad value."""

    file: str
    line: int
    name: str
    owner: Any  # `self` of the method that the line belongs to
    path: str = ""  # of the file that the values were read from, as far as a variable tells
    is_stored: bool = False  # the line only reads the value, which was bad before the watch began


class _Running:
    """A line that a frame is about to run."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.source: Line | None = None  # of a bad value that the line reads
        self.returned: Line | None = None  # of a bad value that a function returned to the line


class Watch:
    """A trace function over the user's own frames.

    Args:
        is_wrong: Given a value and a depth, tells whether it is bad, or holds something bad so deep inside.
        whole_numbers: Whether a whole number of Python's can be bad. It is known by its variable: 4 is one object.
    """

    def __init__(self, is_wrong: Callable[[Any, int], bool] = is_bad, *, whole_numbers: bool = False) -> None:
        self.last: Line | None = None  # of the last bad value that a function returned
        self._is_wrong = is_wrong
        self._known: dict[int, tuple[Any, Line]] = {}  # bad values by identity, each with the line that made it
        self._whole_numbers = whole_numbers
        self._numbers: dict[tuple[FrameType, Path], Line] = {}  # variables whose bad whole number a line made
        self._running: dict[FrameType, _Running] = {}
        self._before: Any = None

    def __enter__(self) -> Watch:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def line_of(self, value: Any) -> Line | None:
        """The line that made a bad value, or that made bad what the value holds."""
        found = self._known.get(id(value))
        if found is not None and found[0] is value:
            return found[1]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return next((line for part in parts if (line := self.line_of(part)) is not None), None)

    @property
    def only(self) -> Line | None:
        """The only line that made a bad value; None where there are several."""
        found = {line[:2]: line for value, line in self._known.values() if not isinstance(value, float)}
        return next(iter(found.values())) if len(found) == 1 else None

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_user_file(frame.f_code.co_filename):
            return None
        self._running[frame] = _Running(frame.f_lineno)
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._ended(frame)
            self._begins(frame)
        elif event == "return":
            self._ended(frame)
            if self._is_wrong(argument, 3):
                self._returned(frame, argument)
        return self._stepped

    def _begins(self, frame: FrameType) -> None:
        block_end = context_blocks(frame.f_code.co_filename).get(frame.f_lineno, 0)
        if frame.f_lineno < self._running[frame].line <= block_end:
            return  # the end of a `with` block: a value that is being returned comes from the line before
        running = self._running[frame] = _Running(frame.f_lineno)
        for path in _accesses(frame, running.line).reads:
            value = _value(frame, path)
            if value is None or isinstance(value, bool | int | str):
                running.source = running.source or self._numbers.get((frame, path))
                continue
            known = self._known.get(id(value))
            if known is not None and known[0] is value:
                running.source = known[1]
            elif running.source is None and not isinstance(value, float) and self._is_wrong(value, 2):
                running.source = self._line(frame, running.line, path, is_stored=True)

    def _ended(self, frame: FrameType) -> None:
        running = self._running[frame]
        for path in _accesses(frame, running.line).writes:
            value = _value(frame, path)
            if self._whole_numbers and type(value) is int:
                self._numbers.pop((frame, path), None)
                if self._is_wrong(value, 0):
                    self._numbers[frame, path] = self._origin(frame, running, path)
            if value is None or isinstance(value, bool | int | str):
                continue
            known = self._known.get(id(value))
            if known is not None and isinstance(value, list | dict):
                continue  # the bad item may be far from both ends by now
            if self._is_wrong(value, 2):
                self._known.setdefault(id(value), (value, self._origin(frame, running, path)))
            elif known is not None:
                del self._known[id(value)]  # repaired

    def _returned(self, frame: FrameType, value: Any) -> None:
        running = self._running[frame]
        line = self.line_of(value) or self._origin(frame, running, ())
        if type(value) is not int:
            self._known[id(value)] = (value, line)
        self.last = line
        outer = frame.f_back
        while outer is not None and outer not in self._running:
            outer = outer.f_back
        if outer is not None:
            self._running[outer].returned = line

    def _origin(self, frame: FrameType, running: _Running, path: Path) -> Line:
        source = running.source or running.returned
        if source is not None:
            return source
        for read in sorted(_accesses(frame, running.line).reads - {path}):
            if self._holds_wrong(_value(frame, read)):
                return self._line(frame, running.line, read, is_stored=True)
        return self._line(frame, running.line, path)

    def _line(self, frame: FrameType, line: int, path: Path, *, is_stored: bool = False) -> Line:
        values = frame.f_locals
        name = path[-1] if path else ""
        return Line(
            frame.f_code.co_filename, line, name, values.get("self"), _file_in(values.values()), is_stored=is_stored
        )

    def _holds_wrong(self, value: Any) -> bool:
        """Whether a container holds something bad, at whatever position."""
        if not isinstance(value, list | tuple | dict):
            return False
        return any(self._is_wrong(part, 0) for part in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    pending = [value]
    for _ in range(_MAX_VALUES):
        if not pending:
            return
        part = pending.pop()
        if isinstance(part, dict):
            pending.extend(part.values())
        elif isinstance(part, list | tuple):
            pending.extend(part)
        else:
            yield part


def _accesses(frame: FrameType, line: int) -> Any:
    return accesses_by_line(frame.f_code.co_filename).get(line, NO_ACCESSES)


def _value(frame: FrameType, path: Path) -> Any:
    """What a path leads to, without running any code of the user's; None where there is nothing."""
    value = frame.f_locals.get(path[0])
    if value is None and len(path) == 1 and path[0] not in frame.f_code.co_varnames:
        value = frame.f_globals.get(path[0])
    for attr in path[1:]:
        value = (getattr(value, "__dict__", None) or {}).get(attr)
    return value


def _file_in(values: Iterable[Any]) -> str:
    """The only file that some variables name; empty where there is none, or several."""
    found = set()
    for value in values:
        with contextlib.suppress(OSError, ValueError):
            if isinstance(value, str | os.PathLike) and os.path.isfile(value):
                found.add(os.fspath(value))
    return found.pop() if len(found) == 1 else ""
