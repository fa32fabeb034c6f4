"""What a thread waits for if its system calls may not be read, from the kernel function that it sleeps in.

With `kernel.yama.ptrace_scope = 1`, usual on a desktop, a user may not read the system calls of their own processes,
but may read that function (`wchan`), the open files and the list of file locks. A descriptor is named only if no other
descriptor is possible.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torchmedic.records.process import FileWait, ProcessView, ThreadView
from torchmedic.supervise.proc import file_locks, open_files
from torchmedic.supervise.proc.process import PROC

_FUNCTIONS = {  # of the kernel, by system call
    "read": "anon_pipe_read pipe_read pipe_wait_readable n_tty_read",
    "write": "anon_pipe_write pipe_write pipe_wait_writable",
    "futex": "futex_do_wait futex_wait_queue futex_wait_queue_me",
    "flock": "locks_lock_inode_wait flock_lock_inode_wait",
    "fcntl": "fcntl_setlk",
    "poll": "poll_schedule_timeout do_sys_poll",
    "select": "do_select",
    "epoll_wait": "do_epoll_wait ep_poll",
    "clock_nanosleep": "hrtimer_nanosleep do_nanosleep",
    "wait4": "do_wait",
    "recvfrom": "unix_stream_read_generic unix_stream_data_wait sk_wait_data",
    "accept": "inet_csk_accept",
    "openat": "wait_for_partner",
}
_CALLS = {function: call for call, functions in _FUNCTIONS.items() for function in functions.split()}
_TTY_OR_SOCKET = "wait_woken"
_PIPES = {name: "r" if "read" in name else "w" for name in _CALLS if "pipe" in name}


def call_of(thread: ThreadView) -> str:
    """The system call that a thread is in; empty if several are possible."""
    name = thread.wchan.partition(".")[0]  # the compiler appends `.constprop.0` and the like
    return _CALLS.get(name, "")


def waits_of(view: ProcessView, thread: ThreadView, *, proc: Path = PROC) -> list[FileWait]:
    """The open files that a thread may wait for."""
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


def _targets(pid: int, kind: str, proc: Path) -> list[tuple[int, str]]:
    return [each for each in open_files.descriptors(pid, proc=proc) if each[1].startswith(kind)]


def _locked(pid: int, proc: Path) -> list[tuple[int, str]]:
    """The descriptor whose file lock a process waits for. The kernel lists the waiting process and the file's inode."""
    waited = {entry.inode for entry in file_locks.listed(proc) if entry.waits and entry.pid == pid}
    for descriptor, target in open_files.descriptors(pid, proc=proc):
        with contextlib.suppress(OSError):
            inode = os.stat(f"{proc}/{pid}/fd/{descriptor}").st_ino
            if any(name.endswith(f":{inode}") for name in waited):
                return [(descriptor, target)]
    return []
