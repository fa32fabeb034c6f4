"""What a thread waits for where its system calls are hidden from us: by the function of the kernel that it sleeps in.

That is the usual state of things on a desktop: with `kernel.yama.ptrace_scope = 1` one may not see the calls of one's
own processes, but the name of that function (`wchan`), the open files and the list of file locks. A descriptor is only
named if no other one can be meant.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torchmedic.records.process import FileWait, ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import file_locks, open_files
from torchmedic.supervise.proc.process import PROC

_CALLS = {
    "anon_pipe_read": "read",
    "pipe_read": "read",
    "pipe_wait_readable": "read",
    "anon_pipe_write": "write",
    "pipe_write": "write",
    "pipe_wait_writable": "write",
    "n_tty_read": "read",
    "futex_do_wait": "futex",
    "futex_wait_queue": "futex",
    "futex_wait_queue_me": "futex",
    "locks_lock_inode_wait": "flock",
    "flock_lock_inode_wait": "flock",
    "fcntl_setlk": "fcntl",
    "poll_schedule_timeout": "poll",
    "do_sys_poll": "poll",
    "do_select": "select",
    "do_epoll_wait": "epoll_wait",
    "ep_poll": "epoll_wait",
    "hrtimer_nanosleep": "clock_nanosleep",
    "do_nanosleep": "clock_nanosleep",
    "do_wait": "wait4",
    "unix_stream_read_generic": "recvfrom",
    "unix_stream_data_wait": "recvfrom",
    "sk_wait_data": "recvfrom",
    "inet_csk_accept": "accept",
    "wait_for_partner": "openat",
}
_TTY_OR_SOCKET = "wait_woken"
_PIPES = {name: "r" if "read" in name else "w" for name in _CALLS if "pipe" in name}


def call_of(thread: ThreadView) -> str:
    """The system call that a thread must be in; empty where several can be meant."""
    name = thread.wchan.partition(".")[0]  # the compiler appends `.constprop.0` and the like
    return _CALLS.get(name, "")


def waits_of(view: ProcessView, thread: ThreadView, *, proc: Path = PROC) -> list[FileWait]:
    """The open file that a thread waits for."""
    name = thread.wchan.partition(".")[0]
    if name == "n_tty_read" or (name == _TTY_OR_SOCKET and not _targets(view.pid, "socket:", proc)):
        target = open_files.target(view.pid, 0, proc=proc)
        return [FileWait(tid=thread.tid, action="read", descriptor=0, target=target)] if _is_tty(target) else []
    if name in _PIPES:
        wanted = _PIPES[name]
        found = [
            each
            for each in _targets(view.pid, "pipe:", proc)
            if wanted in open_files.mode(view.pid, each[0], proc=proc)
        ]
        if len({target for _, target in found}) != 1:
            return []
        descriptor, target = min(found)
        return [
            FileWait(tid=thread.tid, action="read" if wanted == "r" else "write", descriptor=descriptor, target=target)
        ]
    if call_of(thread) in ("flock", "fcntl"):
        return [
            FileWait(tid=thread.tid, action="lock", descriptor=descriptor, target=target)
            for descriptor, target in _locked(view.pid, proc)
        ]
    return []


def _is_tty(target: str) -> bool:
    return target.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))


def _descriptors(pid: int, proc: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return sorted(int(entry) for entry in os.listdir(f"{proc}/{pid}/fd"))
    return []


def _targets(pid: int, kind: str, proc: Path) -> list[tuple[int, str]]:
    targets = ((each, open_files.target(pid, each, proc=proc)) for each in _descriptors(pid, proc))
    return [(descriptor, target) for descriptor, target in targets if target.startswith(kind)]


def _locked(pid: int, proc: Path) -> list[tuple[int, str]]:
    """The list of locks names who waits by its process, and the file by its number."""
    waited = {
        entry.inode for entry in file_locks.entries(text(f"{proc}/locks") or "") if entry.waits and entry.pid == pid
    }
    found = []
    for descriptor in _descriptors(pid, proc):
        with contextlib.suppress(OSError):
            inode = os.stat(f"{proc}/{pid}/fd/{descriptor}").st_ino
            if any(name.endswith(f":{inode}") for name in waited):
                found.append((descriptor, open_files.target(pid, descriptor, proc=proc)))
    return found[:1]
