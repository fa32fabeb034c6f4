"""The contents of a storage outside of the memory that is short: host memory for a device, a file for the host."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

import psutil
import torch

from torchmedic.recovery.pinned_copies import Arrival, PinnedCopies, PinnedCopy
from torchmedic.runfolder.descriptors import out_of_the_way

# As they are now: a replay, which is kept from writing to files of the user's, exchanges the functions of `os`.
_read, _write = os.preadv, os.pwrite
_MAX_WRITE_BYTES = 1 << 30  # a single system call takes no more than 2 GiB


class SpillFile:
    """An unnamed file for contents of host memory. Pieces that are given back are used again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}  # positions by size

    def open(self) -> int:
        """Make the file if there is none yet; a replay may write to it, but not make it.

        Raises:
            OSError: The file cannot be made.
        """
        if self._descriptor is None:
            with tempfile.TemporaryFile(dir=_on_disk(self._folder), buffering=0) as file:
                self._descriptor = out_of_the_way(os.dup(file.fileno()))
        return self._descriptor

    def write(self, address: int, nbytes: int) -> int:
        """Write memory to the file, and return its position there.

        Raises:
            OSError: The disk is full, or the file cannot be made.
        """
        descriptor = self.open()
        free = self._free.get(nbytes)
        position = free.pop() if free else self._end
        try:
            for start, piece in _pieces(address, nbytes):
                _write_whole(descriptor, piece, position + start)
        except BaseException:
            self.release(position, nbytes)
            raise
        self._end = max(self._end, position + nbytes)
        return position

    def read(self, position: int, address: int, nbytes: int) -> None:
        if self._descriptor is None:
            raise OSError("the spill file is closed")
        for start, piece in _pieces(address, nbytes):
            done = 0
            while done < len(piece):
                count = _read(self._descriptor, [piece[done:]], position + start + done)
                if not count:
                    raise OSError("the spill file is too short")
                done += count

    def release(self, position: int, nbytes: int) -> None:
        """Give a piece of the file back."""
        self._free.setdefault(nbytes, []).append(position)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _on_disk(folder: Path) -> Path:
    """The folder, or the next best one if the folder itself lies in memory."""
    places = [folder, Path(tempfile.gettempdir()), Path("/var/tmp")]
    return next((each for each in places if each.is_dir() and not _is_in_memory(each)), folder)


def _is_in_memory(folder: Path) -> bool:
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    kind = next((mounted[str(each)] for each in [resolved, *resolved.parents] if str(each) in mounted), "")
    return kind in ("tmpfs", "ramfs")


class Parked:
    """The bytes of one storage. `into` brings them back, as often as it is asked to."""

    def __init__(self, storage: torch.UntypedStorage, space: ParkingSpace, *, overlapped: bool = False) -> None:
        """Copy the bytes.

        Args:
            storage: Its memory can be freed or used again at once.
            space: Where the copy goes.
            overlapped: Whether the copy may hold the memory of a device for a while, so that nothing waits for it.

        Raises:
            OSError: There is no room for the copy.
        """
        self.device = storage.device
        self.nbytes = storage.nbytes()
        self._file = space.file
        self._copy: PinnedCopy | None = None
        self._position: int | None = None
        copies = space.copies(self.device)
        if copies is None:
            self._position = space.file.write(storage.data_ptr(), self.nbytes)
        else:
            self._copy = copies.take(storage, overlapped=overlapped)

    @property
    def copies(self) -> PinnedCopies | None:
        """The copies of the device; None for memory of the host."""
        return None if self._copy is None else self._copy.copies

    def into(self, storage: torch.UntypedStorage) -> None:
        if self._copy is not None:
            Arrival(self._copy, storage).storage()
        elif self._position is not None:
            self._file.read(self._position, storage.data_ptr(), self.nbytes)

    def new_storage(self) -> torch.UntypedStorage:
        """A storage of its own with these bytes."""
        storage = self._empty_storage()
        self.into(storage)
        return storage

    def arrival(self) -> Arrival | None:
        """Start to bring the bytes back into a new storage; None where nothing is gained by an early start."""
        return None if self._copy is None else Arrival(self._copy, self._empty_storage())

    def _empty_storage(self) -> torch.UntypedStorage:
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def __del__(self) -> None:
        if getattr(self, "_position", None) is not None and self._position is not None:
            self._file.release(self._position, self.nbytes)


class ParkingSpace:
    """Where the contents of storages go: the host for a device, a file for the host."""

    def __init__(self, folder: Path) -> None:
        self.file = SpillFile(folder)
        self._copies: dict[torch.device, PinnedCopies] = {}

    def copies(self, device: torch.device) -> PinnedCopies | None:
        """The copies of a device; None for the host, whose contents go to the file."""
        if device.type == "cpu":
            return None
        found = self._copies.get(device)
        if found is None:
            found = self._copies[device] = PinnedCopies(device)
        return found

    def catch_up(self) -> None:
        """Free the memory of devices that copies under way still hold."""
        for each in self._copies.values():
            each.catch_up()


def _pieces(address: int, nbytes: int) -> list[tuple[int, memoryview]]:
    found = []
    for start in range(0, nbytes, _MAX_WRITE_BYTES):
        size = min(_MAX_WRITE_BYTES, nbytes - start)
        found.append((start, memoryview((ctypes.c_char * size).from_address(address + start)).cast("B")))
    return found


def _write_whole(descriptor: int, piece: memoryview, position: int) -> None:
    done = 0
    while done < len(piece):
        done += _write(descriptor, piece[done:], position + done)
