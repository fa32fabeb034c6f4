"""Who holds the file lock that a thread waits for: /proc/locks lists the holder and, below it, who waits."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from torchmedic.records.process import FileWait, LockHeld
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import open_files, process
from torchmedic.supervise.proc.process import PROC


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of /proc/locks. `number` is that of the lock that is waited for, if `waits`."""

    number: str
    waits: bool
    kind: str
    mode: str
    pid: int
    inode: str
    first: int
    last: float


def entries(listing: str) -> list[Entry]:
    found = []
    for line in listing.splitlines():
        words = line.split()
        waits = len(words) > 1 and words[1] == "->"
        if waits:
            del words[1]
        if len(words) < 8 or not words[4].lstrip("-").isdigit():
            continue
        number, kind, _, mode, pid, inode, first, last = words[:8]
        found.append(
            Entry(
                number=number.rstrip(":"),
                waits=waits,
                kind=kind,
                mode=mode,
                pid=int(pid),
                inode=inode,
                first=int(first) if first.isdigit() else 0,
                last=float(last) if last.isdigit() else float("inf"),
            )
        )
    return found


def locks_awaited(pid: int, wait: FileWait, *, proc: Path = PROC) -> tuple[LockHeld, ...]:
    """The holders of what one thread of a process waits for. The kernel names the waiter by its process."""
    listed = entries(text(f"{proc}/locks") or "")
    waits = [entry for entry in listed if entry.waits and entry.pid == pid]
    inode = f":{_inode(pid, wait.descriptor, proc)}"
    # Some file systems (overlay) give a file another number there, so this only decides between several.
    waits = [entry for entry in waits if entry.inode.endswith(inode)] or waits
    held = (
        _held(entry, wait.tid, wait.target, proc)
        for waiter in waits
        for entry in listed
        if not entry.waits and entry.number == waiter.number
    )
    return tuple(dict.fromkeys(held))


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
    """A lock belongs to the open file: it outlives the process that took it in any child that inherited that.

    The descriptors' own pages say which of them bear the lock.
    """
    for file in open_files.holders({path}, proc=proc).get(path, ()):
        page = open_files.info(file.pid, file.descriptor, proc=proc)
        marks = (line for line in page.splitlines() if line.startswith("lock:"))
        if any(entry.inode in line.split() and "->" not in line for line in marks):
            return file.pid
    return 0
