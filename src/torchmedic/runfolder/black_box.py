"""The black box of a process: its format, and the reading of it, whatever happened to its writer.

A ring of the last moments. A slot carries its sequence number in front and again behind; a writer that dies half-way
leaves the two unequal, and the reader falls back to the slot before. File names are kept once, in an append-only table
whose entry becomes visible only when its length is written, after its bytes.

    header (64 B) | table of file names (32 KiB) | 1024 slots of 64 B

`observe/step/blackbox.py` writes it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from torchmedic.errors import UnreadableRun
from torchmedic.records import PHASES, BoxContents, Moment, Phase, SignalOrigin
from torchmedic.runfolder import reading

MAGIC = b"TMBLKBOX"
VERSION = 1
SLOTS = 1024

HEADER = struct.Struct("<8sIIQdI")  # magic, version, slots, pid, started, clean exit
CLEAN_EXIT = struct.Struct("<I")
CLEAN_EXIT_AT = HEADER.size - CLEAN_EXIT.size
SIGNAL = struct.Struct("<IiQ")  # signal, si_code, si_pid and si_uid or si_addr: see observe/fatal_signals.py
SIGNAL_AT = 40
TABLE_AT = 64
_TABLE_SIZE = 32 * 1024
LENGTH = struct.Struct("<H")
RING_AT = TABLE_AT + _TABLE_SIZE
SLOT = struct.Struct("<QdIIHHIQQQQ")  # sequence, time, step, micro, phase, file, line, rss, device, updates, sequence
_FRONT = struct.Struct("<Q")
SIZE = RING_AT + SLOTS * SLOT.size
_MAX_TIME = 4e9  # seconds since 1970

assert SLOT.size == 64


class Beat(NamedTuple):
    """The fields of a moment that show progress."""

    time: float
    step: int
    micro_step: int
    updates: int
    phase: Phase


def read(path: Path, *, follow: bool = False) -> BoxContents:
    """Read a black box back, whatever happened to its writer. `follow`: the path is a link of /proc.

    Raises:
        UnreadableRun: The file is missing, truncated or not a black box.
    """
    try:
        data = reading.read(path, SIZE, cut=True, follow=follow)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    return contents(data, path)


def bytes_of(descriptor: int) -> bytes:
    """The whole black box behind a descriptor."""
    return os.pread(descriptor, SIZE, 0)


def contents(data: bytes, path: Path) -> BoxContents:
    """The black box in these bytes, which were read from this path.

    Raises:
        UnreadableRun: The bytes are not a whole black box.
    """
    if len(data) < SIZE or not data.startswith(MAGIC):
        raise UnreadableRun(f"cannot read {path}: it is not a whole black box")
    _, version, _, pid, started, clean = HEADER.unpack_from(data, 0)
    if version != VERSION:
        raise UnreadableRun(f"cannot read {path}: black box version {version}, this is version {VERSION}")
    if not (0 < pid < 1 << 31 and _is_time(started)):
        raise UnreadableRun(f"cannot read {path}: it is damaged")
    files = _read_table(data)
    moments = []
    for slot in range(SLOTS):
        front, when, step, micro, phase, file, line, rss, device, updates, back = SLOT.unpack_from(
            data, RING_AT + slot * SLOT.size
        )
        if front == back != 0 and phase < len(PHASES) and _is_time(when):
            moments.append((front, when, step, micro, phase, file, line, rss, device, updates))
    moments.sort()
    return BoxContents(
        pid=pid,
        started=started,
        clean_exit=bool(clean),
        signal=_read_signal(data),
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
    """Reads what is new in a black box while its writer goes on, with two system calls per look.

    Raises:
        UnreadableRun: There is no whole black box yet.
    """

    def __init__(self, path: Path) -> None:
        try:
            # Not mapped: the file may be a plain one, and somebody may truncate it.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UnreadableRun(f"cannot read {path}: {error}") from None
        magic, version, _, self.pid, self.started, _ = HEADER.unpack(self._at(0, HEADER.size))
        if magic != MAGIC or version != VERSION or os.fstat(self._descriptor).st_size < SIZE:
            raise UnreadableRun(f"cannot read {path}: it is not a whole black box")
        self._sequence = 0

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def _at(self, offset: int, size: int) -> bytes:
        """Bytes of the box; zeros where the file has been cut."""
        return os.pread(self._descriptor, size, offset).ljust(size, b"\0")

    @property
    def clean_exit(self) -> bool:
        return bool(CLEAN_EXIT.unpack(self._at(CLEAN_EXIT_AT, CLEAN_EXIT.size))[0])

    def new(self, most: int) -> list[Beat]:
        """The latest moments since the last look, the oldest first."""
        found: list[Beat] = []
        ring = self._at(RING_AT, SLOTS * SLOT.size)
        last = _last(ring)
        for sequence in range(max(self._sequence, last - most, last - SLOTS + 1) + 1, last + 1):
            front, when, step, micro, phase, _, _, _, _, updates, back = SLOT.unpack_from(
                ring, (sequence % SLOTS) * SLOT.size
            )
            if front == back == sequence and phase < len(PHASES):
                found.append(Beat(when, step, micro, updates, PHASES[phase]))
        self._sequence = max(self._sequence, last)
        return found


def _last(ring: bytes) -> int:
    """The highest number in the ring: numbers rise from slot 0 up to it, and are lower after it."""
    start = _number(ring, 0)
    low, high = 0, SLOTS
    while high - low > 1:
        middle = (low + high) // 2
        if _number(ring, middle) > start:
            low = middle
        else:
            high = middle
    return _number(ring, low)


def _number(ring: bytes, slot: int) -> int:
    return int(_FRONT.unpack_from(ring, slot * SLOT.size)[0])


def _read_signal(data: bytes) -> SignalOrigin | None:
    number, code, rest = SIGNAL.unpack_from(data, SIGNAL_AT)
    if not number:
        return None
    if code > 0:
        return SignalOrigin(number=number, code=code, address=rest)
    return SignalOrigin(number=number, code=code, pid=rest & 0xFFFFFFFF)


def _read_table(data: bytes) -> list[str]:
    files = [""]
    at = TABLE_AT
    while at + LENGTH.size <= RING_AT:
        (length,) = LENGTH.unpack_from(data, at)
        if length == 0:
            break
        files.append(data[at + LENGTH.size : at + LENGTH.size + length].decode(errors="replace"))
        at += LENGTH.size + length
    return files
