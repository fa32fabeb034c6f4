"""Names of the system calls in which a training process can wait, by number.

Newer architectures (aarch64) have only the newer variant of a call, such as `ppoll` but not `poll`.
"""

from __future__ import annotations

import platform


def _numbers(listed: str) -> dict[int, str]:
    pairs = (word.split("=") for word in listed.split())
    return {int(number): name for name, number in pairs}


_X86_64 = _numbers(
    """
    read=0 write=1 poll=7 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20 select=23 sched_yield=24 pause=34
    nanosleep=35 sendfile=40 connect=42 accept=43 sendto=44 recvfrom=45 sendmsg=46 recvmsg=47 wait4=61 semop=65
    msgrcv=70 fcntl=72 flock=73 fsync=74 fdatasync=75 ftruncate=77 rt_sigtimedwait=128 rt_sigsuspend=130 sync=162
    futex=202 io_getevents=208 semtimedop=220 clock_nanosleep=230 epoll_wait=232 waitid=247 openat=257 pselect6=270
    ppoll=271 splice=275 sync_file_range=277 epoll_pwait=281 fallocate=285 accept4=288 recvmmsg=299 syncfs=306
    copy_file_range=326 io_pgetevents=333 io_uring_enter=426 epoll_pwait2=441 futex_waitv=449
    """
)

_AARCH64 = _numbers(
    """
    io_getevents=4 epoll_pwait=22 fcntl=25 ioctl=29 flock=32 ftruncate=46 fallocate=47 openat=56 read=63 write=64
    readv=65 writev=66 pread64=67 pwrite64=68 sendfile=71 pselect6=72 ppoll=73 splice=76 sync=81 fsync=82
    fdatasync=83 sync_file_range=84 waitid=95 futex=98 nanosleep=101 clock_nanosleep=115 sched_yield=124
    rt_sigsuspend=133 rt_sigtimedwait=137 msgrcv=188 semtimedop=192 semop=193 accept=202 connect=203 sendto=206
    recvfrom=207 sendmsg=211 recvmsg=212 accept4=242 recvmmsg=243 wait4=260 syncfs=267 copy_file_range=285
    io_pgetevents=292 io_uring_enter=426 epoll_pwait2=441 futex_waitv=449
    """
)

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
