"""The writer of the black box: a ring of the last moments that outlives its process.

One writer, no lock, fixed size; `runfolder/black_box.py` has the format and reads it.

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
from collections.abc import Iterator
from pathlib import Path
from time import time as now
from typing import Any

from torchmedic.runfolder.black_box import (
    CLEAN_EXIT,
    CLEAN_EXIT_AT,
    HEADER,
    LENGTH,
    MAGIC,
    RING_AT,
    SIGNAL,
    SIGNAL_AT,
    SIZE,
    SLOT,
    SLOTS,
    TABLE_AT,
    VERSION,
)
from torchmedic.runfolder.descriptors import out_of_the_way

MEMORY_NAME = "torchmedic-blackbox"  # of the memory file; /proc/<pid>/fd shows it as /memfd:<name>


class BlackBox:
    """The writing side. Not safe for several writers: a forked child must open its own.

    Raises:
        OSError: There are no memory files, or no memory for one.
    """

    descriptor: int | None  # of the memory file

    def __init__(self) -> None:
        self.descriptor = memory_file(MEMORY_NAME, bytes(SIZE))
        try:
            self._begin(mapped(self.descriptor, SIZE))
        except BaseException:
            self.close()
            raise

    def _begin(self, memory: Any) -> None:
        self._map = memory
        self._sequence = 0
        self._pack = SLOT.pack_into
        self._files: dict[str, int] = {}
        self._table_end = TABLE_AT
        HEADER.pack_into(self._map, 0, MAGIC, VERSION, SLOTS, os.getpid(), now(), 0)

    def signal_record(self) -> ctypes.Array[ctypes.c_char] | None:
        """The part of the memory in which the sender of a fatal signal is noted."""
        return (ctypes.c_char * SIGNAL.size).from_buffer(self._map, SIGNAL_AT)

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
        return self.descriptor is not None and hand_over(self.descriptor, addresses, name)

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
            RING_AT + (sequence % SLOTS) * 64,
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
        end = self._table_end + LENGTH.size + len(data)
        if end + LENGTH.size > RING_AT:
            self._files[file] = 0  # the table is full: number 0 stands for "some file"
            return 0
        self._map[self._table_end + LENGTH.size : end] = data
        LENGTH.pack_into(self._map, self._table_end, len(data))
        self._table_end = end
        number = self._files[file] = len([known for known in self._files.values() if known]) + 1
        return number

    def mark_clean_exit(self) -> None:
        CLEAN_EXIT.pack_into(self._map, CLEAN_EXIT_AT, 1)


class FileBox(BlackBox):
    """A black box in a plain file, for systems without memory files. Every moment costs a system call.

    Raises:
        OSError: The file cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = out_of_the_way(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            self._begin(bytearray(SIZE))
            _fill(self.descriptor, self._map)
        except BaseException:
            self.close()
            raise

    def write(self, *moment: Any) -> None:
        super().write(*moment)
        self._save(RING_AT + (self._sequence % SLOTS) * SLOT.size, SLOT.size)

    def _enter(self, file: str) -> int:
        start, number = self._table_end, super()._enter(file)
        self._save(start, self._table_end - start)
        return number

    def mark_clean_exit(self) -> None:
        super().mark_clean_exit()
        self._save(CLEAN_EXIT_AT, CLEAN_EXIT.size)

    def signal_record(self) -> None:
        return None  # this memory is gone with the process

    def hand_over(self, addresses: list[Path], name: str) -> bool:
        return True  # the parent process finds the file

    def _save(self, start: int, size: int) -> None:
        if self.descriptor is not None and size:
            os.pwrite(self.descriptor, self._map[start : start + size], start)


def hand_over(descriptor: int, addresses: list[Path], name: str) -> bool:
    """Send a memory file to the parent process, which listens at one of these addresses; whether it was sent.

    What was sent arrives even if this process is killed the next moment.
    """
    for address in addresses:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.setblocking(False)
            with reachable(address) as short:
                channel.connect(short)
            socket.send_fds(channel, [name.encode()], [descriptor])
            return True
    return False


def memory_file(name: str, content: bytes) -> int:
    """The descriptor of a memory file that nobody can truncate.

    Raises:
        OSError: There is no memory for it.
        AttributeError: There are no memory files on this system.
    """
    descriptor = out_of_the_way(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        _fill(descriptor, content)  # real pages: a hole may have no memory behind it later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, size: int) -> mmap.mmap:
    """The memory of a file, without the descriptor that a map of Python's opens for itself under a low number.

    The map would close this number at its end, when the number may be that of a file of the script's: it never ends.
    """
    low = os.dup(descriptor)
    os.close(low)
    memory = mmap.mmap(descriptor, size)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(low), os.fstat(descriptor)):  # no other thread has taken the number
            os.close(low)
    return memory


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
