"""The time after which a sleep, or a wait with a time limit, ends by itself, from the arguments of the system call.

Python sleeps until a moment, so the remaining seconds are exact. For a sleep of a given length only an upper bound is
known.
"""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

import msgspec

from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.supervise.proc.process import PROC, peek

_ABSOLUTE = 1
_FUTEX_COMMAND, _FUTEX_WAIT, _FUTEX_WALL_CLOCK = 0x7F, 0, 0x100
_TIMESPEC = struct.Struct("<qq")


def with_sleeps(view: ProcessView, *, proc: Path = PROC) -> ProcessView:
    """Add the seconds after which the wait of each thread ends by itself."""
    ends = {thread.tid: wakes_in(view.pid, thread, proc=proc) for thread in view.threads}
    if not any(end is not None for end in ends.values()):
        return view
    threads = tuple(msgspec.structs.replace(thread, wakes_in=ends[thread.tid]) for thread in view.threads)
    return msgspec.structs.replace(view, threads=threads)


def wakes_in(pid: int, thread: ThreadView, *, proc: Path = PROC) -> float | None:
    """Seconds after which a thread's sleep or wait ends at the latest; None if it has no end or may not be read."""
    if thread.state != "S" or len(thread.arguments) < 4:
        return None
    first, second, third, fourth = thread.arguments[:4]
    if thread.syscall == "clock_nanosleep":
        return _left(pid, third, first if second & _ABSOLUTE else None, proc)
    if thread.syscall == "nanosleep":
        return _left(pid, first, None, proc)
    if thread.syscall == "futex" and fourth:
        relative = second & _FUTEX_COMMAND == _FUTEX_WAIT
        clock = time.CLOCK_REALTIME if second & _FUTEX_WALL_CLOCK else time.CLOCK_MONOTONIC
        return _left(pid, fourth, None if relative else clock, proc)
    if thread.syscall in ("poll", "epoll_wait", "epoll_pwait"):
        milliseconds = (third if thread.syscall == "poll" else fourth) & 0xFFFFFFFF
        return milliseconds / 1000 if milliseconds < 1 << 31 else None
    return None


def _left(pid: int, address: int, clock: int | None, proc: Path) -> float | None:
    """The remaining seconds of a `timespec` in a process's memory: a moment on `clock`, or a length if that is None."""
    raw = peek(pid, address, _TIMESPEC.size, proc=proc)
    if len(raw) < _TIMESPEC.size:
        return None
    seconds, nanoseconds = _TIMESPEC.unpack(raw)
    if not 0 <= nanoseconds < 1_000_000_000 or seconds < 0:
        return None
    moment = seconds + nanoseconds / 1e9
    if clock is None:
        return float(moment)
    with contextlib.suppress(OSError, ValueError):
        return float(max(0.0, moment - time.clock_gettime(clock)))
    return None
