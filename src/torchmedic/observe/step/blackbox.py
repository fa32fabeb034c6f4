"""The black box: a ring of the last moments that outlives its process.

One writer, no lock, fixed size. A slot carries its sequence number in front and again behind; a writer that dies
half-way leaves the two unequal, and the reader falls back to the slot before. File names are kept once, in an
append-only table whose entry becomes visible only when its length is written, after its bytes.

    header (64 B) | table of file names (32 KiB) | 1024 slots of 64 B

The ring lies in a memory file (`memfd_create`) whose size is sealed. A mapped file that somebody truncates kills its
process with SIGBUS; a sealed one cannot be truncated. The writer hands the descriptor to the parent process, which
keeps the memory alive and writes it to the run folder at the end. Where there are no memory files, the box is a plain
file that is never mapped (`FileBox`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from time import time as now
from typing import Any, NamedTuple

from torchmedic.errors import UnreadableRun
from torchmedic.records import PHASES, BoxContents, Moment, Phase, SignalOrigin
from torchmedic.runfolder import reading

MAGIC = b"TMBLKBOX"
VERSION = 1
SLOTS = 1024

_HEADER = struct.Struct("<8sIIQdI")  # magic, version, slots, pid, started, clean exit
_CLEAN_EXIT = struct.Struct("<I")
_CLEAN_EXIT_AT = _HEADER.size - _CLEAN_EXIT.size
_SIGNAL = struct.Struct("<IiQ")  # signal, si_code, si_pid and si_uid or si_addr: see observe/signal_origin.py
_SIGNAL_AT = 40
_TABLE_AT = 64
_TABLE_SIZE = 32 * 1024
_LENGTH = struct.Struct("<H")
_RING_AT = _TABLE_AT + _TABLE_SIZE
_SLOT = struct.Struct("<QdIIHHIQQQQ")  # sequence, time, step, micro, phase, file, line, rss, device, updates, sequence
_FRONT = struct.Struct("<Q")
_SIZE = _RING_AT + SLOTS * _SLOT.size
_MAX_TIME = 4e9  # seconds since 1970

assert _SLOT.size == 64

MEMORY_NAME = "torchmedic-blackbox"  # of the memory file; /proc/<pid>/fd shows it as /memfd:<name>


class Beat(NamedTuple):
    """The fields of a moment that show progress."""

    time: float
    step: int
    micro_step: int
    updates: int
    phase: Phase


class BlackBox:
    """The writing side. Not safe for several writers: a forked child must open its own.

    Raises:
        OSError: There are no memory files, or no memory for one.
    """

    descriptor: int | None  # of the memory file

    def __init__(self) -> None:
        low = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Above the standard streams, one of which the script may have closed.
            self.descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
        finally:
            os.close(low)
        try:
            _fill(self.descriptor, bytes(_SIZE))  # real pages: a hole may have no memory behind it later
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self._begin(mmap.mmap(self.descriptor, _SIZE))
        except BaseException:
            self.close()
            raise

    def _begin(self, memory: Any) -> None:
        self._map = memory
        self._sequence = 0
        self._pack = _SLOT.pack_into
        self._files: dict[str, int] = {}
        self._table_end = _TABLE_AT
        _HEADER.pack_into(self._map, 0, MAGIC, VERSION, SLOTS, os.getpid(), now(), 0)

    def signal_record(self) -> ctypes.Array[ctypes.c_char] | None:
        """The part of the memory in which the sender of a fatal signal is noted."""
        return (ctypes.c_char * _SIGNAL.size).from_buffer(self._map, _SIGNAL_AT)

    def close(self) -> None:
        """Close the descriptor. What the parent process has been handed stays."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # a script may close all descriptors
                os.close(descriptor)

    def hand_over(self, addresses: list[Path], name: str) -> bool:
        """Send the memory file to the parent process, which listens at one of these addresses.

        What was sent arrives even if this process is killed the next moment.
        """
        descriptor = self.descriptor
        if descriptor is None:
            return False
        for address in addresses:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
                channel.setblocking(False)
                with reachable(address) as short:
                    channel.connect(short)
                socket.send_fds(channel, [name.encode()], [descriptor])
                return True
        return False

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


class FileBox(BlackBox):
    """A black box in a plain file, for systems without memory files. Every moment costs a system call.

    Raises:
        OSError: The file cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._begin(bytearray(_SIZE))
            _fill(self.descriptor, self._map)
        except BaseException:
            self.close()
            raise

    def write(self, *moment: Any) -> None:
        super().write(*moment)
        self._save(_RING_AT + (self._sequence % SLOTS) * _SLOT.size, _SLOT.size)

    def _enter(self, file: str) -> int:
        start, number = self._table_end, super()._enter(file)
        self._save(start, self._table_end - start)
        return number

    def mark_clean_exit(self) -> None:
        super().mark_clean_exit()
        self._save(_CLEAN_EXIT_AT, _CLEAN_EXIT.size)

    def signal_record(self) -> None:
        return None  # this memory is gone with the process

    def hand_over(self, addresses: list[Path], name: str) -> bool:
        return True  # the parent process finds the file

    def _save(self, start: int, size: int) -> None:
        if self.descriptor is not None and size:
            os.pwrite(self.descriptor, self._map[start : start + size], start)


def _fill(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    if written < len(data):  # at a limit for the size of files; the next write would say so
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


@contextlib.contextmanager
def reachable(address: Path) -> Iterator[str]:
    """A path to a socket that is short enough for the kernel, however deep the run folder lies."""
    folder = os.open(address.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)


def read(path: Path, *, follow: bool = False) -> BoxContents:
    """Read a black box back, whatever happened to its writer. `follow`: the path is a link of /proc.

    Raises:
        UnreadableRun: The file is missing, truncated or not a black box.
    """
    try:
        data = reading.read(path, _SIZE, cut=True, follow=follow)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    return contents(data, path)


def bytes_of(descriptor: int) -> bytes:
    """The whole black box behind a descriptor."""
    return os.pread(descriptor, _SIZE, 0)


def contents(data: bytes, path: Path) -> BoxContents:
    """The black box in these bytes, which were read from this path.

    Raises:
        UnreadableRun: The bytes are not a whole black box.
    """
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
    """Reads what is new in a black box while its writer goes on; a look costs some microseconds.

    Raises:
        UnreadableRun: There is no whole black box yet.
    """

    def __init__(self, path: Path) -> None:
        try:
            # Not mapped: the file may be a plain one, and somebody may truncate it.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UnreadableRun(f"cannot read {path}: {error}") from None
        magic, version, _, self.pid, self.started, _ = _HEADER.unpack(self._at(0, _HEADER.size))
        if magic != MAGIC or version != VERSION or os.fstat(self._descriptor).st_size < _SIZE:
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
        return bool(_CLEAN_EXIT.unpack(self._at(_CLEAN_EXIT_AT, _CLEAN_EXIT.size))[0])

    def new(self, most: int) -> list[Beat]:
        """The latest moments since the last look, the oldest first."""
        found: list[Beat] = []
        last = self._last()
        for sequence in range(max(self._sequence, last - most, last - SLOTS + 1) + 1, last + 1):
            front, when, step, micro, phase, _, _, _, _, updates, back = _SLOT.unpack(
                self._at(_RING_AT + (sequence % SLOTS) * _SLOT.size, _SLOT.size)
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
        return int(_FRONT.unpack(self._at(_RING_AT + slot * _SLOT.size, _FRONT.size))[0])


def _read_signal(data: bytes) -> SignalOrigin | None:
    number, code, rest = _SIGNAL.unpack_from(data, _SIGNAL_AT)
    if not number:
        return None
    if code > 0:
        return SignalOrigin(number=number, code=code, address=rest)
    return SignalOrigin(number=number, code=code, pid=rest & 0xFFFFFFFF)


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
