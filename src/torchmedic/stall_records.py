"""Records of processes that do not get on: how they look from outside, from inside, and what a stall is.

Like `records.py`, nothing here imports torch: the parent reads all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torchmedic.records import BoxContents, GpuHealth, Phase


class ThreadView(msgspec.Struct, frozen=True, kw_only=True):
    """One thread as the kernel shows it. `busy` is its share of one core between two looks."""

    tid: int
    name: str = ""
    state: str = "?"
    cpu: float = 0.0
    busy: float | None = None
    switches: int = 0
    wchan: str = ""
    syscall: str = ""
    arguments: tuple[int, ...] = ()
    stack_pointer: int = 0
    native: tuple[str, ...] = ()


class FutexWait(msgspec.Struct, frozen=True, kw_only=True):
    """A thread that waits for a mutex: `owner` is the thread that the mutex itself names, which may not exist."""

    tid: int
    address: int
    owner: int | None = None
    owner_lives: bool | None = None


class FileWait(msgspec.Struct, frozen=True, kw_only=True):
    """A thread in a system call on an open file. `peers` are the processes that hold the other end of its pipe."""

    tid: int
    action: Literal["read", "write", "lock", "poll", "connect", "accept"]
    descriptor: int
    target: str = ""
    peers: tuple[int, ...] = ()


class LockHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the file lock that a process waits for, by /proc/locks."""

    kind: str
    path: str
    holder: int
    command: str = ""
    age: float | None = None


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """One process as the kernel shows it, and what changed between two looks (`elapsed` seconds apart)."""

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

    @property
    def main(self) -> ThreadView | None:
        return self.thread(self.pid)

    def thread(self, tid: int) -> ThreadView | None:
        return next((thread for thread in self.threads if thread.tid == tid), None)

    @property
    def is_loader_worker(self) -> bool:
        return self.main is not None and self.main.name == "pt_data_worker"


class PyFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A Python frame. `user` is whether its file is the user's. `code` is the expression under way, if known."""

    file: str
    line: int
    function: str
    user: bool = False
    lasti: int = -1
    column: int = 1
    end_column: int = 1
    code: str = ""


class LockView(msgspec.Struct, frozen=True, kw_only=True):
    """A lock that a thread waits for or holds: the object, how the source names it, and the line that took it."""

    identity: int
    kind: str
    name: str
    file: str = ""
    line: int = 0
    owner: int | None = None


class PyThread(msgspec.Struct, frozen=True, kw_only=True):
    """A thread as Python shows it, innermost frame first.

    `samples` are the positions of its innermost user frame in several looks: all equal means that it did not move.
    """

    ident: int
    tid: int = 0
    name: str = ""
    main: bool = False
    daemon: bool = False
    frames: tuple[PyFrame, ...] = ()
    waits_for: LockView | None = None
    holds: tuple[LockView, ...] = ()
    samples: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    holds_gil: bool | None = None

    @property
    def moved(self) -> bool:
        return len(set(self.samples)) > 1

    @property
    def user_frame(self) -> PyFrame | None:
        return next((frame for frame in self.frames if frame.user), None)

    def calls(self, function: str, file: str = "") -> PyFrame | None:
        """The innermost frame of a function of this name, in a file whose path ends or contains so."""
        return next((each for each in self.frames if each.function == function and file in each.file), None)


class LoaderView(msgspec.Struct, frozen=True, kw_only=True):
    """A DataLoader that is being iterated over with workers, as its main process knows it.

    `given` is, by worker, the dataset items that it has been given and has not delivered.
    """

    workers: tuple[int, ...]
    alive: tuple[bool, ...]
    exit_codes: tuple[int | None, ...] = ()
    given: tuple[tuple[str, ...], ...] = ()
    timeout: float = 0.0
    start_method: str = ""


class InsideView(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself. Absent where it could not answer, because the GIL is held, say."""

    pid: int
    time: float
    threads: tuple[PyThread, ...] = ()
    loaders: tuple[LoaderView, ...] = ()
    torch_threads: int | None = None
    forked: bool = False
    torch_threads_at_fork: int | None = None
    device_busy: bool | None = None
    allocator_retries: int | None = None
    loop: LoopView | None = None
    item: str = ""

    @property
    def main(self) -> PyThread | None:
        return next((thread for thread in self.threads if thread.main), None)


class LoopView(msgspec.Struct, frozen=True, kw_only=True):
    """The innermost loop of the user's that the main thread is in, over several looks.

    `unchanged` names what its condition reads, where all of that stayed the same; `values` shows it.
    """

    file: str
    line: int
    end_line: int
    code: str
    kind: Literal["while", "for"]
    endless: bool = False
    unchanged: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    iterates: str = ""
    empty_iterable: bool = False


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """What the host says of pressure, in the seconds of the examination. None where it does not say."""

    memory_full: float | None = None
    io_full: float | None = None
    throttled: float | None = None
    cpu_quota: float | None = None
    swap_in: float | None = None
    shm_free: int | None = None
    shm_total: int | None = None
    cores: int | None = None


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run that has not got on for longer than its phase ever took.

    `pid` is the process whose progress is missing; `processes` are it, its children and theirs. `stuck` is that
    nothing moved in all the looks; else something did, and `still` says for how many seconds no step or phase has
    ended. `usual` is the longest that this phase has taken before, None in the first steps.
    """

    pid: int
    rank: int = 0
    phase: Phase = "other"
    step: int = 0
    still: float
    limit: float
    usual: float | None = None
    attached: bool = False
    box: BoxContents | None = None
    processes: tuple[ProcessView, ...] = ()
    inside: dict[int, InsideView] = {}
    host: HostView = HostView()
    gpu: GpuHealth | None = None
    ended: dict[int, int] = {}
    notes: tuple[str, ...] = ()

    def process(self, pid: int) -> ProcessView | None:
        return next((process for process in self.processes if process.pid == pid), None)

    @property
    def view(self) -> ProcessView | None:
        return self.process(self.pid)

    @property
    def inner(self) -> InsideView | None:
        return self.inside.get(self.pid)
