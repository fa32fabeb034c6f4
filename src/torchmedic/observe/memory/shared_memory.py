"""/dev/shm: how large it is, how much of it is taken, and what lies there that nobody uses any more.

Tensors that go from one process to another lie there, and so do the locks of `multiprocessing`. Torch takes the name of
its files away at once, so that they go with their processes; a file that still has its name outlives them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

FOLDER = Path("/dev/shm")
_MAX_FILES = 10_000
_MAX_PROCESSES = 4_000


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `left` is what lies in files that no process has open, as far as all processes can be seen."""

    size: int
    free: int
    inodes: int = 1  # that are free
    left: int = 0
    left_files: int = 0
    example: str = ""

    @property
    def used(self) -> int:
        return self.size - self.free


def shared_memory(folder: Path = FOLDER, proc: Path = Path("/proc")) -> SharedMemory | None:
    """The state of `/dev/shm` now; None where there is no such file system."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    left = _left(folder, proc)
    return SharedMemory(
        size=found.f_blocks * found.f_frsize,
        free=found.f_bavail * found.f_frsize,
        inodes=found.f_favail if found.f_files else 1,
        left=sum(left.values()),
        left_files=len(left),
        example=max(left, key=lambda name: left[name], default=""),
    )


def _left(folder: Path, proc: Path) -> dict[str, int]:
    """Files of ours that no process has open or mapped, by name; none where that cannot be told."""
    mine: dict[tuple[int, int], tuple[str, int]] = {}
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder))[:_MAX_FILES]:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                # What is no more than a lock may wait for the next process that wants it.
                if entry.is_file(follow_symlinks=False) and status.st_uid == os.getuid() and status.st_blocks > 8:
                    mine[status.st_dev, status.st_ino] = (entry.name, status.st_blocks * 512)
    if not mine:
        return {}
    names = {f"{folder}/{name}" for name, _ in mine.values()}
    for path in _used(proc):
        names.discard(path)
    return {name: nbytes for name, nbytes in mine.values() if f"{folder}/{name}" in names}


def _used(proc: Path) -> Iterator[str]:
    """Every file that a process which we may look into has mapped or open."""
    processes = [name for name in os.listdir(proc) if name.isdigit()] if proc.is_dir() else []
    for pid in processes[:_MAX_PROCESSES]:
        with contextlib.suppress(OSError):
            for line in (proc / pid / "maps").read_text(errors="replace").splitlines():
                at = line.find("/")
                if at >= 0:
                    yield line[at:].removesuffix(" (deleted)")
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(proc / pid / "fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(proc / pid / "fd" / descriptor)
