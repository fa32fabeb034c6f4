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

from torchmedic.observe.memory import headroom

_MAX_CPU_SECONDS = 10.0  # seconds of CPU time that a copy may take
_MAX_IDLE_SECONDS = 3.0  # seconds for which a copy may be idle: it may wait for a lock whose owner was not copied
_MAX_SECONDS = 40.0  # seconds by the clock, for a machine on which the copy seldom gets a turn
_POLL_SECONDS = 0.2
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MAX_ANSWER_BYTES = 1 << 20


def seen_by_copy(
    look: Callable[[], bytes], at_end: Callable[[], None] = lambda: None, longest: float = _MAX_SECONDS
) -> bytes:
    """What a function gives in a forked copy of this process; nothing where that cannot be had."""
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
        return _answer(reading, child, min(longest, _MAX_SECONDS))
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


def _answer(reading: int, child: int, longest: float) -> bytes:
    found, began, worked = b"", time.monotonic(), 0.0
    stirred = began  # when it was last seen at work
    while len(found) < _MAX_ANSWER_BYTES:
        if select.select([reading], [], [], _POLL_SECONDS)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                return found
            found += part
            continue
        now, (runs, work) = time.monotonic(), _at_work(child)
        if runs or work > worked:
            stirred, worked = now, work
        if work > _MAX_CPU_SECONDS or now - stirred > _MAX_IDLE_SECONDS or now - began > longest:
            break
    return b""


def _at_work(child: int) -> tuple[bool, float]:
    """Whether a process is running or runnable, and the seconds of CPU that it has had."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{child}/stat", "rb", buffering=0) as file:
        words = file.read(1024).rpartition(b")")[2].split()
        return words[0] == b"R", (int(words[11]) + int(words[12])) / _TICKS_PER_SECOND
    return False, 0.0


def _end(child: int) -> None:
    """End the copy: it has answered, or takes too long."""
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return  # somebody else has waited for it
