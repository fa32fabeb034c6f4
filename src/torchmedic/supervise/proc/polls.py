"""The descriptors of a wait for several: `poll`, `select` and `epoll`."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Literal

from torchmedic.records.process import ThreadView
from torchmedic.supervise.proc.open_files import info
from torchmedic.supervise.proc.process import PROC, peek

Wants = Literal["read", "write", ""]

_IN, _OUT = 1, 4
_MAX_DESCRIPTORS = 64
_EPOLL_ENTRY = re.compile(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)", re.MULTILINE)

CALLS = frozenset("poll ppoll select pselect6 epoll_wait epoll_pwait epoll_pwait2".split())


def polled(pid: int, thread: ThreadView, *, proc: Path = PROC) -> list[tuple[int, Wants]]:
    """The descriptors that a thread waits for, and what it wants to do with each."""
    arguments = (*thread.arguments, 0, 0, 0, 0)
    if thread.syscall in ("poll", "ppoll"):
        raw = peek(pid, arguments[0], 8 * min(arguments[1], _MAX_DESCRIPTORS), proc=proc)
        entries = struct.iter_unpack("<iHH", raw[: len(raw) // 8 * 8])
        return [(descriptor, _wants(events)) for descriptor, events, _ in entries if descriptor >= 0]
    if thread.syscall in ("select", "pselect6"):
        count = min(arguments[0], 1024)
        readable = _set(pid, arguments[1], count, proc)
        return [(each, "read") for each in readable] + [
            (each, "write") for each in _set(pid, arguments[2], count, proc) if each not in readable
        ]
    entries_of = _EPOLL_ENTRY.findall(info(pid, arguments[0], proc=proc))
    return [(int(descriptor), _wants(int(events, 16))) for descriptor, events in entries_of[:_MAX_DESCRIPTORS]]


def is_timed(thread: ThreadView) -> bool:
    """Whether the wait has a time limit."""
    arguments = (*thread.arguments, 0, 0, 0, 0, 0)
    if thread.syscall == "poll":
        return arguments[2] & 0xFFFFFFFF < 1 << 31
    if thread.syscall in ("epoll_wait", "epoll_pwait"):
        return arguments[3] & 0xFFFFFFFF < 1 << 31
    if thread.syscall in ("select", "pselect6"):
        return arguments[4] != 0
    return arguments[3 if thread.syscall == "epoll_pwait2" else 2] != 0


def _wants(events: int) -> Wants:
    return "read" if events & _IN else "write" if events & _OUT else ""


def _set(pid: int, address: int, count: int, proc: Path) -> list[int]:
    raw = peek(pid, address, (count + 7) // 8, proc=proc)
    return [number for number in range(min(count, 8 * len(raw))) if raw[number // 8] >> (number % 8) & 1]
