"""Maps thread numbers: from a container's PID namespace, and from Python, to the numbers that the host shows.

Python, and so faulthandler, identifies a thread by its `pthread_t`, which is the address of the C library's record of
the thread. That record contains the kernel's number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from torchmedic.supervise.proc import process
from torchmedic.supervise.proc.process import PROC, peek, status_words

_USUAL_OFFSETS = (720, 208)  # of the number in glibc's record, on x86-64 and on aarch64
_RECORD_BYTES = 2048


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

    For an unknown C library, the offset is searched for: at the right offset, each record contains the number of a
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
