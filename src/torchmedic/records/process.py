"""Records of processes as the kernel shows them: their threads, what those wait for, and what they did meanwhile.

Like `records/report.py`, nothing here imports torch: the parent reads all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LISTENER = "torchmedic"  # what the kernel calls the thread that torchmedic has in a process


class ThreadView(msgspec.Struct, frozen=True, kw_only=True):
    """One thread as the kernel shows it.

    `busy` is its share of one core between two looks, `demand` the share that it would have taken had the machine not
    been busy with others, `wakes` how often a second it was given one. `switches` is that in all, `waited` the seconds
    that it had to wait for a core. `syscall` is `running` on a CPU, empty where the kernel holds it outside any call or
    does not tell us. `asleep` is for how many seconds it has not run at all, where the kernel says so, `wakes_in` after
    how many at most its sleep, or its wait with a time limit, ends by itself.
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
    """A thread that waits for a futex, and if that is a mutex, the thread that the mutex itself names as its owner.

    `owner_lives` is whether that is a thread of this process (for a mutex that processes share: of any).
    `owner_process` is the process that has a thread of this number now. `joins` is the thread whose end is waited for,
    if that is so. `timed` is that the wait ends by itself.
    """

    tid: int
    address: int
    owner: int | None = None
    owner_lives: bool | None = None
    owner_process: int | None = None
    joins: int | None = None
    timed: bool = False


class FileWait(msgspec.Struct, frozen=True, kw_only=True):
    """A thread in a system call on an open file.

    `peers` are the processes that hold the other end of its pipe or socket; those of other users are hidden. `wants` is
    what a poll waits for. `timed` is that the wait ends by itself. `remote` and `connection` are of a TCP socket:
    `10.0.0.2:29500`, `SYN_SENT`. There is no descriptor (-1) yet in `open`.
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
    """Who holds the file lock that a thread waits for, by /proc/locks. `age` is that of the process that holds it.

    `holder_lives` is whether the process that took the lock is still there: else one that inherited the open file
    holds it. A `holder` of 0 cannot be named.
    """

    kind: str
    path: str
    holder: int
    command: str = ""
    age: float | None = None
    tid: int = 0
    holder_lives: bool = True


class FileGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a process has open for writing and that grew between two looks; `rate` is in bytes a second."""

    path: str
    size: int
    rate: float


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """One process as the kernel shows it, and what changed between two looks (`elapsed` seconds apart).

    `name` is the kernel's, `exit_status` that of a zombie, negative for a signal. `open_to_us` is whether the calls of
    its threads may be seen. `taken` is the monotonic time of the look. `faults` (major ones) and `io` (rchar, wchar,
    read_bytes, write_bytes) are the totals from which `major_faults`, `bytes_read` and `bytes_written`, all per second,
    are made. `libraries` are the compilers of the CUDA driver that it has loaded.
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
    major_faults: float | None = None
    bytes_read: float | None = None
    bytes_written: float | None = None
    caught_signals: int = 0
    name: str = ""
    group: int = 0
    session: int = 0
    exit_status: int | None = None
    open_to_us: bool = True
    taken: float = 0.0
    faults: int = 0
    io: tuple[int, ...] = ()
    growing: tuple[FileGrowth, ...] = ()
    libraries: tuple[str, ...] = ()

    @property
    def main(self) -> ThreadView | None:
        return self.thread(self.pid)

    @property
    def own_threads(self) -> tuple[ThreadView, ...]:
        """The threads of the process itself, without the one that torchmedic has in it."""
        return tuple(thread for thread in self.threads if thread.name != LISTENER)

    @property
    def listener(self) -> ThreadView | None:
        return next((thread for thread in self.threads if thread.name == LISTENER), None)

    @property
    def demand(self) -> float:
        """How many cores its threads wanted between two looks, whether they got them or not."""
        return sum(thread.demand or 0.0 for thread in self.own_threads)

    def thread(self, tid: int) -> ThreadView | None:
        return next((thread for thread in self.threads if thread.tid == tid), None)

    @property
    def is_loader_worker(self) -> bool:
        return self.main is not None and self.main.name == "pt_data_worker"
