"""The lines that led to a collective: those of the user, and those of libraries such as a Trainer.

A collective may be called a thousand times in a second, and nearly always by the same frames as the last time. So these
are compared first, frame by frame at the depth where they were. Only identities of code objects and offsets are
compared (to hash a code object takes longer than all the rest), and lines are looked up once per call site.
"""

from __future__ import annotations

from sys import _getframe as frame_at
from types import CodeType, FrameType

from torchmedic.runfolder.ring import Lines, Ring
from torchmedic.source.user_code import is_library_file, is_user_file

MAX_USER_FRAMES = 5
MAX_LIBRARY_FRAMES = 24
_MAX_DEPTH = 64  # frames that are looked at
_MAX_KNOWN = 1024  # calls whose last frames are known
_OTHER, _LIBRARY, _USER = range(3)


# The frames that make a call site: how far below the last one each is, its code and its instruction. Where the stack
# has ended, its outermost frame is the last one.
Path = list[tuple[int, CodeType, int]]


class CallSites:
    """The call sites of one process, by their number in its ring."""

    def __init__(self) -> None:
        self._last: dict[bytes, tuple[Path, bool, int]] = {}  # by call: its last path, whether that is the whole stack
        self._numbers: dict[tuple[int, ...], int] = {}
        self._codes: list[CodeType] = []  # kept alive, so that their identities stay unique
        self._kinds: dict[str, int] = {}  # of files

    def clear(self) -> None:
        self._last.clear()
        self._numbers.clear()
        self._codes.clear()

    def number(self, call: bytes, ring: Ring) -> int:
        """The number of the call site that the callers of this function make; a new one is entered into the ring.

        Args:
            call: What is called. The same call tends to come from the same place.
            ring: Takes the lines of a call site.
        """
        last = self._last.get(call)
        if last is not None:
            path, is_whole, number = last
            try:
                for depth, code, lasti in path:
                    frame = frame_at(depth)
                    if frame.f_code is not code or frame.f_lasti != lasti:
                        break
                else:
                    if not is_whole or frame.f_back is None:
                        return number
            except ValueError:  # the stack is not that deep
                pass
        path, is_whole, number = self._walked(frame_at(1), ring)
        if len(self._last) >= _MAX_KNOWN:
            self._last.clear()
        self._last[call] = path, is_whole, number
        return number

    def _walked(self, frame: FrameType | None, ring: Ring) -> tuple[Path, bool, int]:
        """The path of a frame and its callers, whether it reaches the end of the stack, and its number in the ring."""
        path: Path = []
        codes: list[CodeType] = []
        places: list[int] = []
        users = depth = 0
        while frame is not None and depth < _MAX_DEPTH and users < MAX_USER_FRAMES:
            depth += 1
            code, lasti, outer = frame.f_code, frame.f_lasti, frame.f_back
            kind = self._kinds.get(code.co_filename)
            if kind is None:
                kind = self._judge(code.co_filename)
            if kind:
                codes.append(code)
                places += (id(code), lasti)
                users += kind == _USER
            if kind or outer is None:
                path.append((depth, code, lasti))
            frame = outer
        key = tuple(places)
        number = self._numbers.get(key)
        if number is None:
            self._codes += codes
            number = self._numbers[key] = ring.enter(*self._lines(codes, key[1::2]))
        return path, frame is None, number

    def _judge(self, filename: str) -> int:
        kind = _USER if is_user_file(filename) else _LIBRARY if is_library_file(filename) else _OTHER
        self._kinds[filename] = kind
        return kind

    def _lines(self, codes: list[CodeType], offsets: tuple[int, ...]) -> tuple[Lines, Lines]:
        both: dict[int, list[tuple[str, int, str]]] = {_USER: [], _LIBRARY: []}
        for code, offset in zip(codes, offsets, strict=True):
            both[self._kinds[code.co_filename]].append((code.co_filename, _line(code, offset), code.co_name))
        return tuple(both[_USER]), tuple(both[_LIBRARY][:MAX_LIBRARY_FRAMES])


def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno
