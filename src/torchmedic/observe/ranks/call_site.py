"""The lines that led to a collective: those of the user, and those of libraries such as a Trainer.

A collective may be called a thousand times in a second. So only identities of code objects and offsets are compared (to
hash a code object takes longer than all the rest), and lines are looked up once per call site.
"""

from __future__ import annotations

from types import CodeType, FrameType

from torchmedic.runfolder.ring import Lines, Ring
from torchmedic.source.user_code import is_library_file, is_user_file

MAX_USER_FRAMES = 5
MAX_LIBRARY_FRAMES = 24
_MAX_DEPTH = 64  # frames that are looked at
_OTHER, _LIBRARY, _USER = range(3)


class CallSites:
    """The call sites of one process, by their number in its ring."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._codes: list[CodeType] = []  # kept alive, so that their identities stay unique
        self._kinds: dict[str, int] = {}  # of files

    def clear(self) -> None:
        self._numbers.clear()
        self._codes.clear()

    def number(self, frame: FrameType | None, ring: Ring) -> int:
        """The number of the call site that `frame` and its callers make; it is entered into the ring if it is new."""
        codes: list[CodeType] = []
        places: list[int] = []
        users = 0
        kind_of = self._kinds.get
        depth = 0
        while frame is not None and depth < _MAX_DEPTH:
            code = frame.f_code
            kind = kind_of(code.co_filename)
            if kind is None:
                kind = self._judge(code.co_filename)
            if kind:
                codes.append(code)
                places += (id(code), frame.f_lasti)
                if kind == _USER:
                    users += 1
                    if users == MAX_USER_FRAMES:
                        break
            frame = frame.f_back
            depth += 1
        key = tuple(places)
        number = self._numbers.get(key)
        if number is None:
            self._codes += codes
            number = self._numbers[key] = ring.enter(*self._lines(codes, key[1::2]))
        return number

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
