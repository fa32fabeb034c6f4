"""The owner of the mutex that a thread waits for. A mutex of the C library (glibc) stores its owner.

Most futexes are no mutexes: condition variables, semaphores, barriers, Python's locks and the GIL store no owner. So an
owner is reported only if every field of the 40 bytes fits a locked mutex with waiters, and the thread still waits.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from torchmedic.records.process import FutexWait, ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import syscalls
from torchmedic.supervise.proc.process import PROC, peek, status_words
from torchmedic.supervise.proc.thread_numbers import inner_numbers

_WAIT, _LOCK_PI, _WAIT_BITSET, _LOCK_PI2 = 0, 6, 9, 13
_COMMAND = 0x7F  # without the flags "private" (0x80) and "realtime clock" (0x100)
_PRIVATE = 0x80
_CONTENDED = 2
_TID_MASK = 0x3FFFFFFF
_WAITERS = 0x80000000
_SHARED, _ROBUST, _ELISION = 0x80, 0x10, 0x300
_RECURSIVE = 1


def futex_waits(view: ProcessView, *, proc: Path = PROC) -> tuple[FutexWait, ...]:
    """The futex waits of all threads of a process."""
    waiting = [thread for thread in view.threads if thread.syscall == "futex" and len(thread.arguments) >= 4]
    if not waiting:
        return ()
    inner = inner_numbers(view.pid, proc=proc)
    return tuple(_wait(view.pid, thread, inner, proc) for thread in waiting)


def _wait(pid: int, thread: ThreadView, inner: dict[int, int], proc: Path) -> FutexWait:
    address, operation, value, timeout = thread.arguments[:4]
    command = operation & _COMMAND
    wait = FutexWait(tid=thread.tid, address=address, timed=timeout != 0)
    if command not in (_WAIT, _WAIT_BITSET, _LOCK_PI, _LOCK_PI2):
        return wait
    raw = peek(pid, address, 40, proc=proc)
    if not _still_waits(pid, thread, proc):
        return wait
    value &= 0xFFFFFFFF
    shared = not operation & _PRIVATE
    owner = _owner(raw, value, command)
    if owner is not None:
        return _owned(wait, owner, inner, proc, shared=shared)
    # To announce the end of a thread, the kernel clears the word that holds the thread's number.
    if shared and value in inner and raw[:4] == struct.pack("<I", value):
        return msgspec.structs.replace(wait, joins=inner[value])
    return wait


def _still_waits(pid: int, thread: ThreadView, proc: Path) -> bool:
    now = syscalls.parse(text(f"{proc}/{pid}/task/{thread.tid}/syscall") or "")
    return now == (thread.syscall, thread.arguments, thread.stack_pointer)


def _owner(raw: bytes, value: int, command: int) -> int | None:
    """The owner stored in `raw`, if it is a mutex. `value` is the lock word that the waiting thread saw."""
    if len(raw) < 40:
        return None
    words: tuple[int, ...] = struct.unpack_from("<IIIII", raw)
    lock, count, owner, users, kind = words
    if command in (_LOCK_PI, _LOCK_PI2):
        return lock & _TID_MASK or None  # the kernel itself reads the owner from here
    flavour, flags = kind & 3, kind & ~3
    if flags & ~(_SHARED | _ROBUST | _ELISION) or not 0 < owner <= _TID_MASK or not 0 < users < 1 << 12:
        return None
    if (count == 0) == (flavour == _RECURSIVE) or count >= 1 << 16:
        return None  # only a recursive mutex counts
    if flags & _ROBUST:
        return owner if lock & _WAITERS and value & _WAITERS and lock & _TID_MASK == owner else None
    if lock != _CONTENDED or value != _CONTENDED or raw[24:40] != bytes(16):
        return None  # only robust mutexes are linked into a list
    return owner


def _owned(wait: FutexWait, owner: int, inner: dict[int, int], proc: Path, *, shared: bool) -> FutexWait:
    if owner in inner:
        return msgspec.structs.replace(wait, owner=inner[owner], owner_lives=True)
    same_space = all(number == tid for number, tid in inner.items())
    # /proc also answers for the numbers of threads, although it does not list them.
    words = status_words(f"{proc}/{owner}/status", "Tgid") if same_space else []
    elsewhere = int(words[0]) if words and words[0].isdecimal() else None
    lives = elsewhere is not None if same_space else None
    return msgspec.structs.replace(wait, owner=owner, owner_lives=lives if shared else False, owner_process=elsewhere)
