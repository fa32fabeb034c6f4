"""A file that is read as a whole: how much that asks for, where the refusal itself names no number."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

from torchmedic.source.lookup.failing_call import UNKNOWN, Call

_READS = frozenset({"read", "readall", "readlines"})
_MIN_BYTES = 1 << 20


class FileRead(NamedTuple):
    name: str
    nbytes: int  # that were asked for


def file_read(call: Call | None) -> FileRead | None:
    """The file whose rest was asked for by a call; None where it is small, or no file, or only a part was wanted."""
    owner = getattr(call.function, "__self__", None) if call is not None else None
    if call is None or call.op not in _READS or not hasattr(type(owner), "fileno"):
        return None
    given = [each.value for each in call.arguments if each.value is not owner]
    if given and given[0] not in (None, -1) and given[0] is not UNKNOWN:
        return None
    with contextlib.suppress(Exception):
        nbytes = _rest_of(owner)
        return FileRead(os.path.basename(str(getattr(owner, "name", ""))), nbytes) if nbytes >= _MIN_BYTES else None
    return None


def _rest_of(file: Any) -> int:
    if file.closed:  # by the `with` that the exception has left: it had just been opened, mostly
        return os.stat(file.name).st_size
    size, begun = os.fstat(file.fileno()).st_size, os.lseek(file.fileno(), 0, os.SEEK_CUR)
    return size - begun if begun < size else size  # all was read, and there was no memory to make a text of it
