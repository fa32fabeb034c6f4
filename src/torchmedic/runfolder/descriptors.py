"""Descriptors that a process of the user's keeps open for torchmedic."""

from __future__ import annotations

import fcntl
import io
import os
import resource
from pathlib import Path

from torchmedic.runfolder.layout import new_file

_FIRST = 3  # above the standard streams, one of which the script may have closed
_HIGHEST = 1024  # numbers up to here are good for `select` as well


def out_of_the_way(descriptor: int) -> int:
    """An open file under a high number; the given descriptor is closed.

    A script may close all descriptors that it does not know (`os.closerange(3, 256)`, as daemons do). The next file
    that the script opens gets the lowest number that is free. If torchmedic still wrote to that number, the words would
    be in a file of the script. Few scripts open as many files as to reach a high number.

    Raises:
        OSError: No number above those of the standard streams is free.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    highest = _HIGHEST if limit == resource.RLIM_INFINITY else min(limit, _HIGHEST)
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, highest * 3 // 4)
    except OSError:  # no number is free there
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(descriptor)


def open_to_the_end(path: Path) -> io.FileIO:
    """A new file that is never closed: neither with a ResourceWarning in a forked child, nor under a number that a file
    of the script has by then.
    """
    return io.FileIO(out_of_the_way(new_file(path)), "wb", closefd=False)
