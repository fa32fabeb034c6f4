"""Processes as the kernel shows them: their threads, what the threads wait for, and what they did between two looks.

Nothing here imports torch: the parent reads all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LISTENER = "torchmedic"  # the kernel's name for torchmedic's thread in a process


class ThreadView(msgspec.Struct, frozen=True, kw_only=True):
    """One thread as the kernel shows it.

    `busy` is its share of one core between two looks, `demand` the share that it would have used on an idle machine,
    `wakes` how often per second it got a core. `switches` counts these in total, `waited` is the seconds that it waited
    for a core. `syscall` is `running` on a CPU, and empty if the thread waits outside any system call or the call may
    not be read. `asleep` is the seconds for which it has not run, `wakes_in` the seconds after which its sleep, or its
    wait with a time limit, ends at the latest.
    """

    tid: int
    name: str = ""
    state: str = "?"
    cpu: float = 0.0
    waited: float = 0.0
    busy: float | None = None
    demand: float | None = None
    switches: int = 0
    wakes: float | None = None
    asleep: float | None = None
    wchan: str = ""
    syscall: str = ""
    arguments: tuple[int, ...] = ()
    stack_pointer: int = 0
    native: tuple[str, ...] = ()
    wakes_in: float | None = None


class FutexWait(msgspec.Struct, frozen=True, kw_only=True):
    """A thread that waits for a futex; if the futex is a mutex, with the owner that the mutex stores.

    `owner_lives`: the owner is a thread of this process (for a shared mutex: of any process). `owner_process` is the
    process that has a thread with this number now. `joins` is the thread whose end is waited for. `timed`: the wait has
    a time limit.
    """

    tid: int
    owner: int | None = None
    owner_lives: bool | None = None
    owner_process: int | None = None
    joins: int | None = None
    timed: bool = False


class FileWait(msgspec.Struct, frozen=True, kw_only=True):
    """A thread in a system call on an open file.

    `peers` are the processes at the other end of its pipe or socket, without those of other users. `wants` is what a
    poll waits for. `timed`: the wait has a time limit. `remote` and `connection` describe a TCP socket, for example
    `10.0.0.2:29500` and `SYN_SENT`. The descriptor of an `open` is -1.
    """

    tid: int
    action: Literal["read", "write", "lock", "poll", "connect", "accept", "open"]
    descriptor: int
    target: str = ""
    peers: tuple[int, ...] = ()
    wants: Literal["read", "write", ""] = ""
    timed: bool = False
    remote: str = ""
    connection: str = ""


class LockHeld(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a file lock that a thread waits for, from /proc/locks. `age` is the age of the holder in seconds.

    `holder_lives`: the process that took the lock still exists; otherwise a process that inherited the open file holds
    it. A `holder` of 0 is unknown.
    """

    kind: str
    path: str
    holder: int
    command: str = ""
    age: float | None = None
    tid: int = 0
    holder_lives: bool = True


class FileGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a process has open for writing and that grew between two looks. `rate` is in bytes per second."""

    path: str
    size: int
    rate: float


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """One process as the kernel shows it, and the changes between two looks (`elapsed` seconds apart).

    `name` is the kernel's. `exit_status` is that of a zombie, negative for a signal. `open_to_us`: the system calls of
    its threads may be read. `taken` is the monotonic time of the look. `io` (rchar, wchar, read_bytes, write_bytes)
    are totals; `bytes_read` and `bytes_written` are per second. `libraries` are the compilers of the CUDA driver that
    the process has loaded.
    """

    pid: int
    parent: int = 0
    command: tuple[str, ...] = ()
    state: str = "?"
    started: float = 0.0
    threads: tuple[ThreadView, ...] = ()
    futexes: tuple[FutexWait, ...] = ()
    files: tuple[FileWait, ...] = ()
    locks: tuple[LockHeld, ...] = ()
    environment: dict[str, str] = {}
    rss: int = 0
    swap: int = 0
    elapsed: float = 0.0
    cpu: float = 0.0
    busy: float | None = None
    bytes_read: float | None = None
    bytes_written: float | None = None
    caught_signals: int = 0
    name: str = ""
    exit_status: int | None = None
    open_to_us: bool = True
    taken: float = 0.0
    io: tuple[int, ...] = ()
    growing: tuple[FileGrowth, ...] = ()
    libraries: tuple[str, ...] = ()

    @property
    def main(self) -> ThreadView | None:
        return self.thread(self.pid)

    @property
    def own_threads(self) -> tuple[ThreadView, ...]:
        """The threads of the process, without torchmedic's thread."""
        return tuple(thread for thread in self.threads if thread.name != LISTENER)

    @property
    def listener(self) -> ThreadView | None:
        return next((thread for thread in self.threads if thread.name == LISTENER), None)

    @property
    def demand(self) -> float:
        """Number of cores that its threads wanted between two looks."""
        return sum(thread.demand or 0.0 for thread in self.own_threads)

    def thread(self, tid: int) -> ThreadView | None:
        return next((thread for thread in self.threads if thread.tid == tid), None)

    @property
    def is_loader_worker(self) -> bool:
        return self.main is not None and self.main.name == "pt_data_worker"
