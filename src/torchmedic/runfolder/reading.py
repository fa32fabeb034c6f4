"""Reads files of a run folder as what they are: data that another person may have made.

Only regular files of a limited size are read: no pipe, no device, and no link that leads out of the folder. JSON with
too many nested brackets counts as damaged.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

MAX_BYTES = 64 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)

_Record = TypeVar("_Record")


def read(path: Path, most: int = MAX_BYTES, *, follow: bool = False, cut: bool = False, last: bool = False) -> bytes:
    """The content of a regular file.

    Args:
        path: The file.
        most: The largest size in bytes.
        follow: Whether the path may be a symbolic link. True for a path that the user named.
        cut: Whether to read the beginning of a larger file.
        last: Whether to read the end of a larger file.

    Raises:
        OSError: The file is missing, too large, a link, or not a regular file; `strerror` is the reason.
    """
    found = os.stat(path, follow_symlinks=follow)  # before it is opened: to open a device can have an effect
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    descriptor = os.open(path, _READ | (0 if follow else _NO_FOLLOW))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if last:
            file.seek(max(0, found.st_size - most))
        data = file.read(most + 1)
    if len(data) > most and not cut and not last:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return data[:most]


def decode(data: bytes, kind: type[_Record]) -> _Record:
    """A record from JSON. Raises msgspec.DecodeError if the JSON is damaged, nested too deeply, or no such record."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise msgspec.DecodeError("it is not UTF-8") from None
