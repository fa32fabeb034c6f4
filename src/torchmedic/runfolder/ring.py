"""The calls of collectives in a ring on disk, which outlives its process.

One writer at a time (the GIL is held), fixed size. As in the black box, a slot carries its number in front and
behind, and a slot that was half written is passed over. The user's lines that a call came from repeat all the time:
each chain of lines is kept once, in an append-only table. The file is written to and never mapped: a mapped file that
somebody truncates would kill the process.

    header (64 B) | table of lines (256 KiB) | 2048 slots of 192 B
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from time import time as now

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, RankLog
from torchmedic.runfolder import reading
from torchmedic.runfolder.descriptors import out_of_the_way

MAGIC = b"TMRANKS3"
SLOTS = 2048
FILE = "collectives"  # its name in the folder of a rank

_HEADER = struct.Struct("<8sQii")  # magic, pid, rank, world size
_TABLE_AT = 64
_TABLE_SIZE = 256 * 1024
_LENGTH = struct.Struct("<H")
_RING_AT = _TABLE_AT + _TABLE_SIZE
_SLOT_SIZE = 192
_TEXT_SIZE = 152
_SLOT = struct.Struct(f"<QdIHH{_TEXT_SIZE}sII")  # number, time, ordinal, site, length, text, thread, low half of number
_SIZE = _RING_AT + SLOTS * _SLOT_SIZE

assert _SLOT.size <= _SLOT_SIZE

Lines = tuple[tuple[str, int, str], ...]  # file, line, function; the innermost first
Sites = list[tuple[tuple[StackFrame, ...], tuple[StackFrame, ...]]]  # the frames of the user, and of libraries


class Ring:
    """The writing side. A forked child must open its own."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._descriptor = out_of_the_way(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
        os.write(self._descriptor, bytes(_SIZE))  # real blocks, not a hole: later writes need no room
        self._put(0, _HEADER.pack(MAGIC, os.getpid(), rank, world_size))
        self._number = 0
        self._sites = 0
        self._table_end = _TABLE_AT
        self._pack = _SLOT.pack

    def _put(self, at: int, data: bytes) -> None:
        os.pwrite(self._descriptor, data, at)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def write(self, text: bytes, ordinal: int, site: int, thread: int = 0) -> None:
        """Note one call; `text` is from `described`, `site` from `enter`."""
        number = self._number = self._number + 1
        slot = self._pack(number, now(), ordinal, site, len(text), text, thread, number & 0xFFFFFFFF)
        os.pwrite(self._descriptor, slot, _RING_AT + (number % SLOTS) * _SLOT_SIZE)

    def enter(self, lines: Lines, library: Lines = ()) -> int:
        """Put a chain of lines into the table; its number there, 0 if the table is full."""
        data = msgspec.json.encode((lines, library))
        end = self._table_end + _LENGTH.size + len(data)
        if end + _LENGTH.size > _RING_AT or len(data) > 0xFFFF:
            return 0
        self._put(self._table_end, _LENGTH.pack(len(data)) + data)
        self._table_end = end
        self._sites += 1
        return self._sites


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
    _, pid, rank, world_size = _HEADER.unpack_from(data, 0)
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


def _data(path: Path) -> bytes:
    try:
        data = reading.read(path, _SIZE, cut=True)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    if len(data) < _SIZE or not data.startswith(MAGIC):
        raise UnreadableRun(f"cannot read {path}: it is not a whole ring of collectives")
    return data


def _numbered(data: bytes) -> Iterator[tuple[int, int]]:
    """The numbers of the calls that are wholly written, each with its slot."""
    for slot in range(SLOTS):
        number, *_, low = _SLOT.unpack_from(data, _RING_AT + slot * _SLOT_SIZE)
        if number and number & 0xFFFFFFFF == low:
            yield number, slot


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
