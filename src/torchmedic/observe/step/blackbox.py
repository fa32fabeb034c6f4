"""The black box: a memory-mapped ring that outlives its process.

One writer, no lock, fixed size. A slot carries its sequence number in front and again behind; a writer that dies
half-way leaves the two unequal, and the reader falls back to the slot before. File names are kept once, in an
append-only table whose entry becomes visible only when its length is written, after its bytes.

    header (64 B) | table of file names (32 KiB) | 1024 slots of 64 B
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from time import time as now
from typing import NamedTuple

from torchmedic.errors import UnreadableRun
from torchmedic.records import PHASES, BoxContents, Moment, Phase
from torchmedic.runfolder import reading

MAGIC = b"TMBLKBOX"
VERSION = 1
SLOTS = 1024

_HEADER = struct.Struct("<8sIIQdI")  # magic, version, slots, pid, started, clean exit
_CLEAN_EXIT = struct.Struct("<I")
_CLEAN_EXIT_AT = _HEADER.size - _CLEAN_EXIT.size
_TABLE_AT = 64
_TABLE_SIZE = 32 * 1024
_LENGTH = struct.Struct("<H")
_RING_AT = _TABLE_AT + _TABLE_SIZE
_SLOT = struct.Struct("<QdIIHHIQQQQ")  # sequence, time, step, micro, phase, file, line, rss, device, updates, sequence
_FRONT = struct.Struct("<Q")
_SIZE = _RING_AT + SLOTS * _SLOT.size
_MAX_TIME = 4e9  # seconds since 1970

assert _SLOT.size == 64


class Beat(NamedTuple):
    """The fields of a moment that show progress."""

    time: float
    step: int
    micro_step: int
    updates: int
    phase: Phase


class BlackBox:
    """The writing side. Not safe for several writers: a forked child must open its own."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            # Real blocks, not a hole: a write to a hole of a mapped file kills the process when the disk is full.
            os.write(descriptor, bytes(_SIZE))
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._sequence = 0
        self._pack = _SLOT.pack_into
        self._files: dict[str, int] = {}
        self._table_end = _TABLE_AT
        _HEADER.pack_into(self._map, 0, MAGIC, VERSION, SLOTS, os.getpid(), now(), 0)

    def write(
        self,
        phase: int,
        step: int,
        micro_step: int,
        updates: int,
        file: str,
        line: int,
        rss: int,
        device_memory: int,
    ) -> None:
        """Note one moment; about a microsecond."""
        name = self._files.get(file)
        if name is None:
            name = self._enter(file)
        sequence = self._sequence = self._sequence + 1
        self._pack(
            self._map,
            _RING_AT + (sequence % SLOTS) * 64,
            sequence,
            now(),
            step & 0xFFFFFFFF,
            micro_step & 0xFFFFFFFF,
            phase,
            name,
            line,
            rss,
            device_memory,
            updates,
            sequence,
        )

    def _enter(self, file: str) -> int:
        data = file.encode(errors="replace")[-1024:]
        end = self._table_end + _LENGTH.size + len(data)
        if end + _LENGTH.size > _RING_AT:
            self._files[file] = 0  # the table is full: number 0 stands for "some file"
            return 0
        self._map[self._table_end + _LENGTH.size : end] = data
        _LENGTH.pack_into(self._map, self._table_end, len(data))
        self._table_end = end
        number = self._files[file] = len([known for known in self._files.values() if known]) + 1
        return number

    def mark_clean_exit(self) -> None:
        _CLEAN_EXIT.pack_into(self._map, _CLEAN_EXIT_AT, 1)


def read(path: Path) -> BoxContents:
    """Read a black box back, whatever happened to its writer.

    Raises:
        UnreadableRun: The file is missing, truncated or not a black box.
    """
    try:
        data = reading.read(path, _SIZE, cut=True)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    if len(data) < _SIZE or not data.startswith(MAGIC):
        raise UnreadableRun(f"cannot read {path}: it is not a whole black box")
    _, version, _, pid, started, clean = _HEADER.unpack_from(data, 0)
    if version != VERSION:
        raise UnreadableRun(f"cannot read {path}: black box version {version}, this is version {VERSION}")
    if not (0 < pid < 1 << 31 and _is_time(started)):
        raise UnreadableRun(f"cannot read {path}: it is damaged")
    files = _read_table(data)
    moments = []
    for slot in range(SLOTS):
        front, when, step, micro, phase, file, line, rss, device, updates, back = _SLOT.unpack_from(
            data, _RING_AT + slot * _SLOT.size
        )
        if front == back != 0 and phase < len(PHASES) and _is_time(when):
            moments.append((front, when, step, micro, phase, file, line, rss, device, updates))
    moments.sort()
    return BoxContents(
        pid=pid,
        started=started,
        clean_exit=bool(clean),
        moments=tuple(
            Moment(
                time=when,
                step=step,
                micro_step=micro,
                updates=updates,
                phase=PHASES[phase],
                file=files[file] if file < len(files) else "",
                line=line,
                rss=rss,
                device_memory=device,
            )
            for _, when, step, micro, phase, file, line, rss, device, updates in moments
        ),
    )


def _is_time(seconds: float) -> bool:
    """Whether a number can be a time: not NaN, not infinite, not in another century."""
    return 0 <= seconds < _MAX_TIME


class Follower:
    """Reads what is new in a black box while its writer goes on; a look costs some microseconds.

    Raises:
        UnreadableRun: There is no whole black box yet.
    """

    def __init__(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UnreadableRun(f"cannot read {path}: {error}") from None
        magic, version, _, self.pid, self.started, _ = _HEADER.unpack_from(self._map, 0)
        if magic != MAGIC or version != VERSION:
            raise UnreadableRun(f"cannot read {path}: it is not a whole black box")
        self._sequence = 0

    @property
    def clean_exit(self) -> bool:
        return bool(_CLEAN_EXIT.unpack_from(self._map, _CLEAN_EXIT_AT)[0])

    def new(self, most: int) -> list[Beat]:
        """The latest moments since the last look, the oldest first."""
        found: list[Beat] = []
        last = self._last()
        for sequence in range(max(self._sequence, last - most, last - SLOTS + 1) + 1, last + 1):
            front, when, step, micro, phase, _, _, _, _, updates, back = _SLOT.unpack_from(
                self._map, _RING_AT + (sequence % SLOTS) * _SLOT.size
            )
            if front == back == sequence and phase < len(PHASES):
                found.append(Beat(when, step, micro, updates, PHASES[phase]))
        self._sequence = max(self._sequence, last)
        return found

    def _last(self) -> int:
        """The highest number in the ring: numbers rise from slot 0 up to it, and are lower after it."""
        start = self._number(0)
        low, high = 0, SLOTS
        while high - low > 1:
            middle = (low + high) // 2
            if self._number(middle) > start:
                low = middle
            else:
                high = middle
        return self._number(low)

    def _number(self, slot: int) -> int:
        return int(_FRONT.unpack_from(self._map, _RING_AT + slot * _SLOT.size)[0])


def _read_table(data: bytes) -> list[str]:
    files = [""]
    at = _TABLE_AT
    while at + _LENGTH.size <= _RING_AT:
        (length,) = _LENGTH.unpack_from(data, at)
        if length == 0:
            break
        files.append(data[at + _LENGTH.size : at + _LENGTH.size + length].decode(errors="replace"))
        at += _LENGTH.size + length
    return files
