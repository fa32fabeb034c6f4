"""Who has a lock on a file that somebody asks for again and again: such a one is not listed as waiting."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from torchmedic.records.inside import InsideView, LockFile, PyThread
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import file_locks, process
from torchmedic.supervise.proc.process import PROC


def with_holders(view: InsideView, *, proc: Path = PROC) -> InsideView:
    """The same view, with the holders of the files that its threads wait for."""
    if not any(thread.lock_file is not None for thread in view.threads):
        return view
    return msgspec.structs.replace(view, threads=tuple(_with_holder(thread, proc) for thread in view.threads))


def _with_holder(thread: PyThread, proc: Path) -> PyThread:
    file = thread.lock_file
    return thread if file is None else msgspec.structs.replace(thread, lock_file=_held(file, proc))


def _held(file: LockFile, proc: Path) -> LockFile:
    with contextlib.suppress(OSError):
        inode = f":{os.stat(file.path).st_ino}"
        for entry in file_locks.entries(text(f"{proc}/locks") or ""):
            if not entry.waits and entry.pid > 0 and entry.inode.endswith(inode):
                command = " ".join(process.command_line(entry.pid, proc=proc))
                return msgspec.structs.replace(file, holder=entry.pid, command=command)
    return file
