"""Who holds the mutex that a thread waits for. The mutex of the C library (glibc) names its owner itself.

Most futexes are no mutexes: condition variables, semaphores, barriers, Python's locks and its GIL name nobody. So an
owner is only claimed of 40 bytes that are a locked mutex with waiters in every field, for which the thread still waits.
"""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

from torchmedic.records.process import FutexWait, ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import syscalls
from torchmedic.supervise.proc.memory import peek
from torchmedic.supervise.proc.process import PROC
from torchmedic.supervise.proc.thread_numbers import inner_numbers

_WAIT, _LOCK_PI, _WAIT_BITSET, _LOCK_PI2 = 0, 6, 9, 13
_COMMAND = 0x7F  # less the flags "private" (0x80) and "by the wall clock" (0x100)
_PRIVATE = 0x80
_CONTENDED = 2
_TID_MASK = 0x3FFFFFFF
_WAITERS = 0x80000000
_SHARED, _ROBUST, _ELISION = 0x80, 0x10, 0x300
_RECURSIVE = 1


def futex_waits(view: ProcessView, *, proc: Path = PROC) -> tuple[FutexWait, ...]:
    """All threads of a process that wait for a futex."""
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
    # The end of a thread is announced by the kernel, at the place where its own number stood.
    if shared and value in inner and raw[:4] == struct.pack("<I", value):
        return FutexWait(tid=thread.tid, address=address, joins=inner[value], timed=wait.timed)
    return wait


def _still_waits(pid: int, thread: ThreadView, proc: Path) -> bool:
    now = syscalls.parse(text(f"{proc}/{pid}/task/{thread.tid}/syscall") or "")
    return now == (thread.syscall, thread.arguments, thread.stack_pointer)


def _owner(raw: bytes, value: int, command: int) -> int | None:
    """The owner that these bytes name, if they are a mutex; `value` is what the waiting thread saw in it."""
    if len(raw) < 40:
        return None
    words: tuple[int, ...] = struct.unpack_from("<IIIII", raw)
    lock, count, owner, users, kind = words
    if command in (_LOCK_PI, _LOCK_PI2):
        return lock & _TID_MASK or None  # the kernel itself goes by this
    flavour, flags = kind & 3, kind & ~3
    if flags & ~(_SHARED | _ROBUST | _ELISION) or not 0 < owner <= _TID_MASK or not 0 < users < 1 << 12:
        return None
    if (count == 0) == (flavour == _RECURSIVE) or count >= 1 << 16:
        return None  # only a recursive mutex counts
    if flags & _ROBUST:
        return owner if lock & _WAITERS and value & _WAITERS and lock & _TID_MASK == owner else None
    if lock != _CONTENDED or value != _CONTENDED or raw[24:40] != bytes(16):
        return None  # only robust mutexes are on a list
    return owner


def _owned(wait: FutexWait, owner: int, inner: dict[int, int], proc: Path, *, shared: bool) -> FutexWait:
    if owner in inner:
        own = inner[owner]
        return FutexWait(tid=wait.tid, address=wait.address, owner=own, owner_lives=True, timed=wait.timed)
    same_space = all(number == tid for number, tid in inner.items())
    elsewhere = _process_of(owner, proc) if same_space else None
    lives = elsewhere is not None if same_space else None
    return FutexWait(
        tid=wait.tid,
        address=wait.address,
        owner=owner,
        owner_lives=lives if shared else False,
        owner_process=elsewhere,
        timed=wait.timed,
    )


def _process_of(tid: int, proc: Path) -> int | None:
    """The process of any thread: /proc answers to the numbers of threads as well, though it does not list them."""
    with contextlib.suppress(ValueError):
        return int((text(f"{proc}/{tid}/status") or "").partition("\nTgid:")[2].split("\n", 1)[0])
    return None
