"""Names of the system calls in which a training process can wait, by number.

Newer architectures (aarch64) have only the newer variant of a call, such as `ppoll` but not `poll`.
"""

from __future__ import annotations

import platform

_X86_64 = {
    0: "read",
    1: "write",
    7: "poll",
    16: "ioctl",
    17: "pread64",
    18: "pwrite64",
    19: "readv",
    20: "writev",
    23: "select",
    24: "sched_yield",
    34: "pause",
    35: "nanosleep",
    40: "sendfile",
    42: "connect",
    43: "accept",
    44: "sendto",
    45: "recvfrom",
    46: "sendmsg",
    47: "recvmsg",
    61: "wait4",
    65: "semop",
    70: "msgrcv",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    77: "ftruncate",
    128: "rt_sigtimedwait",
    130: "rt_sigsuspend",
    162: "sync",
    202: "futex",
    208: "io_getevents",
    220: "semtimedop",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    257: "openat",
    270: "pselect6",
    271: "ppoll",
    275: "splice",
    277: "sync_file_range",
    281: "epoll_pwait",
    285: "fallocate",
    288: "accept4",
    299: "recvmmsg",
    306: "syncfs",
    326: "copy_file_range",
    333: "io_pgetevents",
    426: "io_uring_enter",
    441: "epoll_pwait2",
    449: "futex_waitv",
}

_AARCH64 = {
    4: "io_getevents",
    22: "epoll_pwait",
    25: "fcntl",
    29: "ioctl",
    32: "flock",
    46: "ftruncate",
    47: "fallocate",
    56: "openat",
    63: "read",
    64: "write",
    65: "readv",
    66: "writev",
    67: "pread64",
    68: "pwrite64",
    71: "sendfile",
    72: "pselect6",
    73: "ppoll",
    76: "splice",
    81: "sync",
    82: "fsync",
    83: "fdatasync",
    84: "sync_file_range",
    95: "waitid",
    98: "futex",
    101: "nanosleep",
    115: "clock_nanosleep",
    124: "sched_yield",
    133: "rt_sigsuspend",
    137: "rt_sigtimedwait",
    188: "msgrcv",
    192: "semtimedop",
    193: "semop",
    202: "accept",
    203: "connect",
    206: "sendto",
    207: "recvfrom",
    211: "sendmsg",
    212: "recvmsg",
    242: "accept4",
    243: "recvmmsg",
    260: "wait4",
    267: "syncfs",
    285: "copy_file_range",
    292: "io_pgetevents",
    426: "io_uring_enter",
    441: "epoll_pwait2",
    449: "futex_waitv",
}

_BY_MACHINE = {"x86_64": _X86_64, "amd64": _X86_64, "aarch64": _AARCH64, "arm64": _AARCH64}
_HERE = _BY_MACHINE.get(platform.machine().lower(), {})

RUNNING = "running"


def name(number: int, machine: str | None = None) -> str:
    """The name of a system call, or its number if it is not listed here."""
    known = _HERE if machine is None else _BY_MACHINE.get(machine, {})
    return known.get(number, str(number))


def parse(line: str) -> tuple[str, tuple[int, ...], int]:
    """Parse `/proc/PID/task/TID/syscall`: the name, the six arguments and the stack pointer.

    The name is `running` for a thread on a CPU, and empty for a thread that waits in the kernel outside any call, or if
    the file may not be read.
    """
    words = line.split()
    if not words:
        return "", (), 0
    if words[0] == RUNNING:
        return RUNNING, (), 0
    try:
        number = int(words[0])
        values = tuple(int(word, 16) for word in words[1:])
    except ValueError:
        return "", (), 0
    pointer = values[-2] if len(values) >= 2 else 0
    if number < 0:
        return "", (), pointer
    return name(number), values[:-2], pointer
