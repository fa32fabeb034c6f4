"""Reads small files of the system. A user may have replaced `open` and `os.open`, as tests do: this calls neither."""

from __future__ import annotations

import contextlib
from os import O_CLOEXEC, O_RDONLY, close, open, read  # by name


def bytes_of(path: str) -> bytes:
    """The content of a small file; empty where it cannot be read."""
    found = b""
    with contextlib.suppress(OSError):
        descriptor = open(path, O_RDONLY | O_CLOEXEC)
        try:
            while part := read(descriptor, 1 << 16):
                found += part
        finally:
            close(descriptor)
    return found
