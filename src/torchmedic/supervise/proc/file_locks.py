"""The holders of the file locks that threads wait for: /proc/locks lists a holder and, below it, the waiters."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from torchmedic.records.inside import InsideView, LockFile, PyThread
from torchmedic.records.process import FileWait, LockHeld
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import open_files, process
from torchmedic.supervise.proc.process import PROC


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of /proc/locks. If `waits` is true, `number` is the number of the lock that is waited for."""

    number: str
    waits: bool
    kind: str
    pid: int
    inode: str


def entries(listing: str) -> list[Entry]:
    found = []
    for line in listing.splitlines():
        words = line.split()
        waits = len(words) > 1 and words[1] == "->"
        if waits:
            del words[1]
        if len(words) < 8 or not words[4].lstrip("-").isdigit():
            continue
        number, kind, _, _, pid, inode = words[:6]
        found.append(Entry(number=number.rstrip(":"), waits=waits, kind=kind, pid=int(pid), inode=inode))
    return found


def listed(proc: Path) -> list[Entry]:
    return entries(text(f"{proc}/locks") or "")


def locks_awaited(pid: int, wait: FileWait, *, proc: Path = PROC) -> tuple[LockHeld, ...]:
    """The holders of the lock that a thread waits for. The kernel lists the waiter by its process."""
    locks = listed(proc)
    waits = [entry for entry in locks if entry.waits and entry.pid == pid]
    inode = f":{_inode(pid, wait.descriptor, proc)}"
    # Some file systems (overlay) show another inode there, so the inode only decides between several waits.
    waits = [entry for entry in waits if entry.inode.endswith(inode)] or waits
    held = (
        _held(entry, wait.tid, wait.target, proc)
        for waiter in waits
        for entry in locks
        if not entry.waits and entry.number == waiter.number
    )
    return tuple(dict.fromkeys(held))


def with_holders(view: InsideView, *, proc: Path = PROC) -> InsideView:
    """Add the holders of the files that threads poll for; /proc/locks does not list such a thread as waiting."""
    if not any(thread.lock_file is not None for thread in view.threads):
        return view
    return msgspec.structs.replace(view, threads=tuple(_with_holder(thread, proc) for thread in view.threads))


def _with_holder(thread: PyThread, proc: Path) -> PyThread:
    file = thread.lock_file
    return thread if file is None else msgspec.structs.replace(thread, lock_file=_polled(file, proc))


def _polled(file: LockFile, proc: Path) -> LockFile:
    with contextlib.suppress(OSError):
        inode = f":{os.stat(file.path).st_ino}"
        for entry in listed(proc):
            if not entry.waits and entry.pid > 0 and entry.inode.endswith(inode):
                command = " ".join(process.command_line(entry.pid, proc=proc))
                return msgspec.structs.replace(file, holder=entry.pid, command=command)
    return file


def _inode(pid: int, descriptor: int, proc: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(f"{proc}/{pid}/fd/{descriptor}").st_ino
    return 0


def _held(entry: Entry, tid: int, path: str, proc: Path) -> LockHeld:
    kind = {"FLOCK": "flock", "POSIX": "fcntl", "OFDLCK": "ofd"}.get(entry.kind, entry.kind.lower())
    holder, lives = entry.pid, process.started(entry.pid, proc=proc) is not None
    if not lives:
        holder = _inheritor(entry, path, proc)
    began = process.started(holder, proc=proc) if holder > 0 else None
    return LockHeld(
        kind=kind,
        path=path,
        holder=max(holder, 0),
        command=" ".join(process.command_line(holder, proc=proc)) if holder > 0 else "",
        age=max(0.0, time.time() - began) if began is not None else None,
        tid=tid,
        holder_lives=lives,
    )


def _inheritor(entry: Entry, path: str, proc: Path) -> int:
    """The process that holds a lock whose taker is gone; 0 if unknown.

    A lock belongs to the open file, so it survives in any child that inherited the file. `/proc/PID/fdinfo` shows which
    descriptors bear the lock.
    """
    for file in open_files.holders({path}, proc=proc).get(path, ()):
        page = open_files.info(file.pid, file.descriptor, proc=proc)
        marks = (line for line in page.splitlines() if line.startswith("lock:"))
        if any(entry.inode in line.split() and "->" not in line for line in marks):
            return file.pid
    return 0
