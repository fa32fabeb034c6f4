"""The threads of a process by the numbers that others give them: inside its container, and inside Python.

Python, and so faulthandler, knows a thread by its `pthread_t`, which is the address of the C library's record of it.
That record holds the kernel's number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import process
from torchmedic.supervise.proc.memory import peek
from torchmedic.supervise.proc.process import PROC

_USUAL = (720, 208)  # where glibc has the number, on x86-64 and on aarch64
_RECORD = 2048


def inner_numbers(pid: int, *, proc: Path = PROC) -> dict[int, int]:
    """The threads of a process: the number that they have in its own PID namespace -> the one that we see.

    A mutex names its owner by the former. They differ if the process runs in a container and we do not.
    """
    tids = process.thread_ids(pid, proc=proc)
    spaces = _spaces(pid, pid, proc)
    if len(spaces) < 2:
        return {tid: tid for tid in tids}
    return {numbers[-1]: tid for tid in tids if (numbers := _spaces(pid, tid, proc))}


def _spaces(pid: int, tid: int, proc: Path) -> list[int]:
    status = text(f"{proc}/{pid}/task/{tid}/status") or ""
    return [int(word) for word in status.partition("\nNSpid:")[2].partition("\n")[0].split() if word.isdigit()]


def numbers_of(pid: int, idents: Iterable[int], *, proc: Path = PROC) -> dict[int, int]:
    """Python's numbers of threads (`threading.get_ident`) -> the kernel's.

    Where the C library is not one that we know, the number is looked for: at one and the same place in all the records
    there must be a number of a thread of this process, another one in each.
    """
    inner = inner_numbers(pid, proc=proc)
    records = {ident: peek(pid, ident, _RECORD, proc=proc) for ident in dict.fromkeys(idents)}
    records = {ident: record for ident, record in records.items() if len(record) >= 4}
    if not records or not inner:
        return {}
    best: dict[int, int] = {}
    shortest = min(len(record) for record in records.values())
    for offset in (*_USUAL, *range(0, shortest - 3, 4)):
        found = _at(offset, records, inner)
        if len(found) == len(records):
            return found
        if offset in _USUAL and len(found) > len(best):
            best = found  # a thread that ended since leaves a record that names nobody
    return best


def _at(offset: int, records: dict[int, bytes], inner: dict[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for ident, record in records.items():
        if offset + 4 <= len(record):
            (number,) = struct.unpack_from("<i", record, offset)
            if number in inner and inner[number] not in found.values():
                found[ident] = inner[number]
    return found
