"""Files that are open before a replay, which gets nothing into them.

Python's file objects are of C, yet each looks its own methods up, and those of the one beneath it, by name: so a method
can be put in front of `write` for a while. Text waits in the upper object until it is flushed, so what the step has
written before goes down first, and what the replay wrote goes nowhere at the end.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_KINDS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)


class _Seal(Protocol):
    refused: str
    count: int

    @property
    def is_ours(self) -> bool: ...


class _Muted:
    """One text file; what other threads write to it meanwhile is kept."""

    def __init__(self, text: io.TextIOWrapper, seal: _Seal) -> None:
        self.text = text
        self._seal = seal
        self._write: Callable[[str], int] = text.write
        self.is_shared = False

    def write(self, data: str) -> int:
        if self._seal.is_ours:
            return len(data)
        self.is_shared = True
        return self._write(data)


@contextlib.contextmanager
def open_files_muted(seal: _Seal) -> Iterator[None]:
    """Keep what the thread of the replay writes out of all files that are open now."""
    found = {id(each): each for each in [*living(*_KINDS), *_standard()]}
    files = [each for each in found.values() if _is_written(each)]
    texts = [each for each in files if isinstance(each, io.TextIOWrapper)]
    buffers = [each for each in files if isinstance(each, io.BufferedWriter | io.BufferedRandom)]
    below = {id(each.raw) for each in buffers}
    raws = [each for each in files if isinstance(each, io.FileIO) and id(each) not in below]
    muted: list[_Muted] = []
    with contextlib.ExitStack() as stack:
        for text in texts:
            if _moved_down(text):
                muted.append(_Muted(text, seal))
        above = {id(each.text.buffer): each for each in muted}
        for binary in [*buffers, *raws]:
            _shadow(stack, binary, "write", _swallowing(seal, binary.write, above.get(id(binary))))
        for each in muted:
            _shadow(stack, each.text, "write", each.write)
        try:
            yield
        finally:
            for each in muted:  # those that had their `write` looked up before: a csv writer
                if not each.is_shared:
                    _moved_down(each.text)


def living(*kinds: type) -> list[Any]:
    """All objects of these classes and of those derived from them that have something open.

    There are very many objects to look through, so that is only done where what is open has changed.
    """
    state = _open_now()
    known, found = _found.get(kinds, (None, list[Any]()))
    again: list[Any] = [each() if isinstance(each, weakref.ref) else each for each in found]
    if state and state == known and all(each is not None and not _is_closed(each) for each in again):
        return again
    wanted = set(kinds)
    pending = list(kinds)
    derived: type
    while pending:
        for derived in type.__subclasses__(pending.pop()):
            if derived not in wanted:
                wanted.add(derived)
                pending.append(derived)
    now = [each for each in gc.get_objects() if type(each) in wanted and not _is_closed(each)]
    try:
        _found[kinds] = (state, [weakref.ref(each) for each in now])
    except TypeError:  # a class of which there are no weak references
        if _is_examined:
            _found[kinds] = (state, list(now))
    return now


@contextlib.contextmanager
def found_once() -> Iterator[None]:
    """Keep what `living` finds until the block is over, where many replays ask for it."""
    global _is_examined
    _is_examined = True
    try:
        yield
    finally:
        _is_examined = False
        _found.clear()


def _is_closed(file: Any) -> bool:
    try:
        return bool(getattr(file, "closed", False))
    except ValueError:
        return True  # the file beneath it was taken away


_found: dict[tuple[type, ...], tuple[Any, list[Any]]] = {}
_is_examined = False


def _open_now() -> frozenset[tuple[str, str]]:
    """What the process has open, as the system sees it."""
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the list itself was one of them
                found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(found)


def _standard() -> Iterator[Any]:
    """The streams of the process, which `gc.freeze` hides."""
    for stream in (sys.__stdout__, sys.__stderr__):
        buffer = getattr(stream, "buffer", None)
        yield from (each for each in (stream, buffer, getattr(buffer, "raw", None)) if isinstance(each, _KINDS))


def _is_written(file: io.IOBase) -> bool:
    try:
        return not file.closed and file.writable()
    except Exception:
        return False


def _moved_down(text: io.TextIOWrapper) -> bool:
    """Hand what waits in a text file to the one beneath it, but not on to the disk."""
    with contextlib.ExitStack() as stack:
        try:
            _shadow(stack, text.buffer, "flush", lambda: None)
            type(text).flush(text)
        except Exception:
            return False
    return True


def _swallowing(seal: _Seal, original: Callable[[Any], int], above: _Muted | None) -> Callable[[Any], int]:
    def write(data: Any) -> int:
        if not seal.is_ours or (above is not None and above.is_shared):  # then what comes down may be another's
            return original(data)
        return memoryview(data).nbytes

    return write


def _shadow(stack: contextlib.ExitStack, file: Any, name: str, value: Any) -> None:
    """Put a function in front of a method of this one object."""
    own: dict[str, Any] | None = getattr(file, "__dict__", None)
    if own is None:
        return
    had, before = name in own, own.get(name)

    def put_back() -> None:
        if had:
            own[name] = before
        else:
            own.pop(name, None)

    own[name] = value
    stack.callback(put_back)


class Sink(io.RawIOBase):
    """Takes what it is given and forgets it."""

    def __init__(self, name: Any, mode: str) -> None:
        self.name = name
        self.mode = mode
        self._position = self._length = 0
        self._descriptor: int | None = None

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return "+" in self.mode

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self._position += written
        self._length = max(self._length, self._position)
        return written

    def readinto(self, buffer: Any) -> int:
        return 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self._length = self._position if size is None else size
        return self._length

    def fileno(self) -> int:
        """A descriptor that leads nowhere, for calls such as `os.fsync`."""
        if self._descriptor is None:
            self._descriptor = os.open(os.devnull, os.O_RDWR)
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        super().close()


def opened(
    name: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
) -> Any:
    """What `open` would give for a mode that writes."""
    sink = Sink(name, mode)
    if "b" in mode and buffering == 0:
        return sink
    buffered: Any = io.BufferedRandom(sink) if "+" in mode else io.BufferedWriter(sink)
    if "b" in mode:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text


@contextlib.contextmanager
def databases_locked(seal: _Seal) -> Iterator[None]:
    """Connections to SQLite may be read from."""
    sqlite = sys.modules.get("sqlite3")
    kind = getattr(sqlite, "Connection", None)
    found = living(kind) if kind is not None else []
    locked = []

    def allow(action: int, *args: Any) -> int:
        if not seal.is_ours or action in (sqlite.SQLITE_SELECT, sqlite.SQLITE_READ, sqlite.SQLITE_FUNCTION):  # type: ignore[union-attr]
            return 0
        seal.refused = "a change of a database"
        seal.count += 1
        return 1

    for connection in found:
        with contextlib.suppress(Exception):  # closed, or of another thread
            connection.set_authorizer(allow)
            locked.append(connection)
    try:
        yield
    finally:
        for connection in locked:
            with contextlib.suppress(Exception):
                connection.set_authorizer(None)
