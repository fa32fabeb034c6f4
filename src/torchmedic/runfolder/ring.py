"""The calls of collectives in a ring, which outlives its process.

One writer at a time (the GIL is held), fixed size. As in the black box, a slot carries its number in front and
behind, and a slot that was half written is passed over. The user's lines that a call came from repeat all the time:
each chain of lines is kept once, in an append-only table.

    header (64 B) | table of lines (256 KiB) | 2048 slots of 192 B

The ring begins as a file, which is written to and never mapped: a mapped file that somebody truncates would kill the
process. To write into a file takes ten times as long as to write into memory. So the ring moves into a sealed memory
file as soon as a parent process holds this memory, too. The header of the file then names the memory, the parent copies
what is new into the file every few seconds, and all of it when the process has ended. A reader on the same host reads
the memory, from the process or its parent; on another host, the file.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from time import time as now
from typing import Any

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, RankLog
from torchmedic.runfolder import files, reading
from torchmedic.runfolder.descriptors import out_of_the_way

MAGIC = b"TMRANKS3"
SLOTS = 2048
FILE = "collectives"  # its name in the folder of a rank

_HEADER = struct.Struct("<8sQiiiQ")  # magic, pid, rank, world size, descriptor and token of the memory (0: none)
_HELD_AT = 63  # a byte of the memory: whether the parent holds it
_TABLE_AT = 64
_TABLE_SIZE = 256 * 1024
_LENGTH = struct.Struct("<H")
_RING_AT = _TABLE_AT + _TABLE_SIZE
_SLOT_SIZE = 192
_TEXT_SIZE = 152
_SLOT = struct.Struct(f"<QdIHH{_TEXT_SIZE}sII")  # number, time, ordinal, site, length, text, thread, low half of number
SIZE = _RING_AT + SLOTS * _SLOT_SIZE

_FRONT = struct.Struct("<Q")  # the number of a slot
_pack_into = _SLOT.pack_into

assert _SLOT.size <= _SLOT_SIZE
assert _HEADER.size <= _HELD_AT

Lines = tuple[tuple[str, int, str], ...]  # file, line, function; the innermost first
Sites = list[tuple[tuple[StackFrame, ...], tuple[StackFrame, ...]]]  # the frames of the user, and of libraries


class Ring:
    """The writing side. A forked child must open its own."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._in_memory = -1  # the descriptor of the memory
        self._descriptor = out_of_the_way(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
        os.write(self._descriptor, bytes(SIZE))  # real blocks, not a hole: later writes need no room
        self._who = MAGIC, os.getpid(), rank, world_size
        self._memory: Any = None
        self._is_held = False  # by the parent: nothing is written into the file any more
        self._put(0, _HEADER.pack(*self._who, 0, 0))
        self._number = 0
        self._sites = 0
        self._table_end = _TABLE_AT
        self._pack = _SLOT.pack

    def move(self, memory: Any, descriptor: int, token: int) -> None:
        """Write into mapped memory from now on, and into the file as well until the parent holds the memory."""
        header = _HEADER.pack(*self._who, descriptor, token)
        memory[: len(header)] = header
        self._memory, self._in_memory = memory, descriptor
        os.pwrite(self._descriptor, header, 0)

    def stay(self) -> None:
        """Write into the file only, after all: no parent will hold the memory."""
        self._memory = None
        os.pwrite(self._descriptor, _HEADER.pack(*self._who, 0, 0), 0)

    def _put(self, at: int, data: bytes) -> None:
        memory = self._memory
        if memory is not None:
            memory[at : at + len(data)] = data
            if self._is_held:
                return
            self._is_held = bool(memory[_HELD_AT])
        os.pwrite(self._descriptor, data, at)

    def __del__(self) -> None:
        for descriptor in (self._descriptor, self._in_memory):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def write(self, text: bytes, ordinal: int, site: int, thread: int = 0) -> None:
        """Note one call; `text` is from `described`, `site` from `enter`."""
        number = self._number = self._number + 1
        at, low = _RING_AT + (number % SLOTS) * _SLOT_SIZE, number & 0xFFFFFFFF
        if self._is_held:
            _pack_into(self._memory, at, number, now(), ordinal, site, len(text), text, thread, low)
        else:
            self._put(at, self._pack(number, now(), ordinal, site, len(text), text, thread, low))

    def enter(self, lines: Lines, library: Lines = ()) -> int:
        """Put a chain of lines into the table; its number there, 0 if the table is full."""
        data = msgspec.json.encode((lines, library))
        end = self._table_end + _LENGTH.size + len(data)
        if end + _LENGTH.size > _RING_AT or len(data) > 0xFFFF:
            return 0
        self._put(self._table_end + _LENGTH.size, data)
        self._put(self._table_end, _LENGTH.pack(len(data)))  # last: an entry is there when its length is
        self._table_end = end
        self._sites += 1
        return self._sites


class Copier:
    """The parent's side of a ring in memory.

    Raises:
        UnreadableRun: There is no ring behind the descriptor.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        head = os.pread(descriptor, _HEADER.size, 0)
        if len(head) < _HEADER.size or not head.startswith(MAGIC):
            raise UnreadableRun("it is not a ring of collectives")
        self.descriptor = descriptor
        self._path = path
        self._copied = 0  # the number of the last call in the file
        _, self.pid, *_ = _HEADER.unpack(head)
        os.pwrite(descriptor, b"\1", _HELD_AT)

    def copy(self) -> None:
        """Copy what is new into the file; what was reserved for the file is enough."""
        data = os.pread(self.descriptor, SIZE, 0)
        last = _last_number(data)
        new = range(max(self._copied, last - SLOTS) + 1, last + 1)
        if not new:
            return
        target = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(target, data[_TABLE_AT : _end_of_table(data)], _TABLE_AT)
            first = new.start % SLOTS
            for slots in (range(first, min(first + len(new), SLOTS)), range(max(0, first + len(new) - SLOTS))):
                start, end = (_RING_AT + slot * _SLOT_SIZE for slot in (slots.start, slots.stop))
                os.pwrite(target, data[start:end], start)
            self._copied = last
        finally:
            os.close(target)


def described(
    op: str, group: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], peer: int | None, tag: int = 0
) -> bytes:
    """A call in the text of a slot, shortened to the first tensors if there are many."""
    for most in (max(len(shapes), len(dtypes)), 4, 1, 0):
        text = msgspec.json.encode((op, group[:40], shapes[:most], dtypes[:most], peer, tag))
        if len(text) <= _TEXT_SIZE:
            return text
    return msgspec.json.encode((op[:20], "", (), (), peer, tag))


def read_rank(path: Path) -> int:
    """The rank of the process that has made a ring.

    Raises:
        UnreadableRun: The file is missing or not a ring of collectives.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise UnreadableRun(f"cannot read {path}: it is not a ring of collectives")
    return int(_HEADER.unpack(head)[2])


def read(path: Path) -> RankLog:
    """Read a ring back, whatever happened to its writer.

    Raises:
        UnreadableRun: The file is missing, truncated or not a ring of collectives.
    """
    data = _data(path)
    _, pid, rank, world_size, *_ = _HEADER.unpack_from(data, 0)
    sites = _read_table(data)
    numbered = sorted(_numbered(data))
    found = [(number, call) for number, slot in numbered if (call := _call(data, slot, sites)) is not None]
    return RankLog(
        rank=rank,
        pid=pid,
        world_size=world_size,
        calls=tuple(call for _, call in found),
        dropped=found[0][0] - 1 if found else 0,
    )


def read_last(path: Path) -> tuple[int, Collective | None]:
    """How many calls a process has made, and the last of them; for `torchmedic watch`.

    Raises:
        UnreadableRun: The file is missing, truncated or not a ring of collectives.
    """
    data = _data(path)
    number, slot = max(_numbered(data), default=(0, 0))
    return number, _call(data, slot, _read_table(data)) if number else None


def memory_name(token: int) -> str:
    """The name of a memory file, by which a reader knows it again."""
    return f"torchmedic-calls-{token:016x}"


def _data(path: Path) -> bytes:
    with contextlib.suppress(OSError, struct.error):
        magic, pid, _, _, descriptor, token = _HEADER.unpack(reading.read(path, _HEADER.size, cut=True))
        if magic == MAGIC and token:
            memory = _in_memory(path, pid, descriptor, token)
            if memory is not None:
                return memory  # else the process has ended, and its parent has copied the memory
    return _whole(path)


def _whole(path: Path, *, follow: bool = False) -> bytes:
    try:
        data = reading.read(path, SIZE, cut=True, follow=follow)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    if len(data) < SIZE or not data.startswith(MAGIC):
        raise UnreadableRun(f"cannot read {path}: it is not a whole ring of collectives")
    return data


def _in_memory(path: Path, pid: int, descriptor: int, token: int) -> bytes | None:
    """The ring in the memory of a process of this host, or of its parent; None where there is none."""
    for link in _descriptors(path, pid, descriptor):
        with contextlib.suppress(OSError, UnreadableRun):
            if os.readlink(link).startswith(f"/memfd:{memory_name(token)} "):
                return _whole(Path(link), follow=True)
    return None


def _descriptors(path: Path, pid: int, descriptor: int) -> Iterator[str]:
    yield f"/proc/{pid}/fd/{descriptor}"
    for parent in files.read_supervisors(path.parent.parent):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{parent.pid}/fd"):
                yield f"/proc/{parent.pid}/fd/{name}"


def _numbered(data: bytes) -> Iterator[tuple[int, int]]:
    """The numbers of the calls that are wholly written, each with its slot."""
    for slot in range(SLOTS):
        number, *_, low = _SLOT.unpack_from(data, _RING_AT + slot * _SLOT_SIZE)
        if number and number & 0xFFFFFFFF == low:
            yield number, slot


def _last_number(data: bytes) -> int:
    """The number of the last call, wholly written or not."""

    def number_in(slot: int) -> int:
        return int(_FRONT.unpack_from(data, _RING_AT + slot * _SLOT_SIZE)[0])

    first = number_in(0)
    # The numbers count up from the first slot on, to the last call.
    return first + bisect.bisect_left(range(1, SLOTS), True, key=lambda slot: number_in(slot) < first + slot)


def _call(data: bytes, slot: int, sites: Sites) -> Collective | None:
    _, when, ordinal, site, length, text, thread, _ = _SLOT.unpack_from(data, _RING_AT + slot * _SLOT_SIZE)
    try:
        op, group, shapes, dtypes, peer, tag = _decoded(text[:length])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    frames, library = sites[site] if site < len(sites) else ((), ())
    return Collective(
        op=op,
        group=group,
        ordinal=ordinal,
        shapes=shapes,
        dtypes=dtypes,
        peer=peer,
        tag=tag,
        frames=frames,
        library=library,
        thread=thread,
        time=when,
    )


_Text = tuple[str, str, tuple[tuple[int, ...], ...], tuple[str, ...], int | None, int]


@functools.lru_cache(maxsize=256)
def _decoded(text: bytes) -> _Text:
    """The text of a slot; most slots have one of a few texts."""
    found: _Text = msgspec.json.decode(text, type=_Text)
    return found


def _end_of_table(data: bytes) -> int:
    """Behind the last chain of lines and the length 0 that ends the table."""
    at = _TABLE_AT
    while at + _LENGTH.size <= _RING_AT and (length := _LENGTH.unpack_from(data, at)[0]):
        at += _LENGTH.size + length
    return min(at + _LENGTH.size, _RING_AT)


def _read_table(data: bytes) -> Sites:
    """The chains of lines by their number."""
    sites: Sites = [((), ())]
    at = _TABLE_AT
    while at + _LENGTH.size <= _RING_AT:
        (length,) = _LENGTH.unpack_from(data, at)
        if length == 0:
            break
        text = data[at + _LENGTH.size : at + _LENGTH.size + length]
        try:
            users, library = msgspec.json.decode(text, type=tuple[Lines, Lines])
        except (msgspec.DecodeError, UnicodeDecodeError):
            users, library = (), ()
        sites.append((_frames(users), _frames(library)))
        at += _LENGTH.size + length
    return sites


def _frames(lines: Lines) -> tuple[StackFrame, ...]:
    return tuple(StackFrame(file=file, line=line, function=function) for file, line, function in lines)
