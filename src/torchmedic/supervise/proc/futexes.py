"""The owner of the mutex that a thread waits for, and the numbers of threads. A mutex of glibc stores its owner.

Most futexes are no mutexes: condition variables, semaphores, barriers, Python's locks and the GIL store no owner. So an
owner is reported only if every field of the 40 bytes fits a locked mutex with waiters, and the thread still waits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmedic.records.process import FutexWait, ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import process, syscalls
from torchmedic.supervise.proc.process import PROC, peek, status_words

_WAIT, _LOCK_PI, _WAIT_BITSET, _LOCK_PI2 = 0, 6, 9, 13
_COMMAND = 0x7F  # without the flags "private" (0x80) and "realtime clock" (0x100)
_PRIVATE = 0x80
_CONTENDED = 2
_TID_MASK = 0x3FFFFFFF
_WAITERS = 0x80000000
_SHARED, _ROBUST, _ELISION = 0x80, 0x10, 0x300
_RECURSIVE = 1
_USUAL_OFFSETS = (720, 208)  # of the number in glibc's record, on x86-64 and on aarch64
_RECORD_BYTES = 2048


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
    wait = FutexWait(tid=thread.tid, timed=timeout != 0)
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


def inner_numbers(pid: int, *, proc: Path = PROC) -> dict[int, int]:
    """Thread numbers in the process's own PID namespace -> the numbers that we see.

    A mutex stores the former. They differ if the process runs in a container and torchmedic does not.
    """
    tids = process.thread_ids(pid, proc=proc)
    spaces = _spaces(pid, pid, proc)
    if len(spaces) < 2:
        return {tid: tid for tid in tids}
    return {numbers[-1]: tid for tid in tids if (numbers := _spaces(pid, tid, proc))}


def _spaces(pid: int, tid: int, proc: Path) -> list[int]:
    words = status_words(f"{proc}/{pid}/task/{tid}/status", "NSpid")
    return [int(word) for word in words if word.isdigit()]


def numbers_of(pid: int, idents: Iterable[int], *, proc: Path = PROC) -> dict[int, int]:
    """Python's thread numbers (`threading.get_ident`) -> the kernel's.

    Python's number is the address of the C library's record of the thread, which contains the kernel's number. For an
    unknown C library, the offset is searched for: at the right offset, each record contains the number of a
    different thread of this process.
    """
    inner = inner_numbers(pid, proc=proc)
    records = {ident: peek(pid, ident, _RECORD_BYTES, proc=proc) for ident in dict.fromkeys(idents)}
    records = {ident: record for ident, record in records.items() if len(record) >= 4}
    if not records or not inner:
        return {}
    best: dict[int, int] = {}
    shortest = min(len(record) for record in records.values())
    for offset in (*_USUAL_OFFSETS, *range(0, shortest - 3, 4)):
        found = _at(offset, records, inner)
        if len(found) == len(records):
            return found
        if offset in _USUAL_OFFSETS and len(found) > len(best):
            best = found  # the record of a thread that has ended contains no number
    return best


def _at(offset: int, records: dict[int, bytes], inner: dict[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for ident, record in records.items():
        if offset + 4 <= len(record):
            (number,) = struct.unpack_from("<i", record, offset)
            if number in inner and inner[number] not in found.values():
                found[ident] = inner[number]
    return found
