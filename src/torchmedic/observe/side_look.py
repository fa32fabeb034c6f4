"""A look at a process from inside of it that leaves it as it was: a forked copy looks, and says what it has found.

To explain takes modules and memory of its own. A process that goes on, and has hardly any memory left, would miss them:
a worker that is about to tell of its failure must still be able to start the thread that does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import warnings
from collections.abc import Callable

from torchmedic.observe import headroom

_PATIENCE = 5.0  # seconds; a copy may wait for a lock whose owner it has lost
_MOST = 1 << 20  # bytes of an answer


def seen_by_copy(look: Callable[[], bytes], at_end: Callable[[], None] = lambda: None) -> bytes:
    """What a function gives in a forked copy of this process; nothing where that cannot be had.

    Args:
        look: Called with the soft limits of memory lifted.
        at_end: Called in the copy, before it goes.
    """
    sizes = headroom.sizes()
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads, which the copy has not
            child = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return b""
    if child == 0:
        _be_copy(look, at_end, writing, sizes)
    os.close(writing)
    try:
        return _answer(reading)
    finally:
        os.close(reading)
        _end(child)


def _be_copy(look: Callable[[], bytes], at_end: Callable[[], None], writing: int, sizes: dict[str, int]) -> None:
    try:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if the kernel must kill somebody for memory, then the copy
        with headroom.headroom(sizes):
            found = look()
            while found:
                found = found[os.write(writing, found) :]
            at_end()
    finally:
        os._exit(0)


def _answer(reading: int) -> bytes:
    found, end = b"", time.monotonic() + _PATIENCE
    while len(found) < _MOST:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        part = os.read(reading, 1 << 16) if ready else b""
        if not part:
            return found if ready else b""
        found += part
    return b""


def _end(child: int) -> None:
    """It has said all, or takes too long."""
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return  # somebody else has waited for it
