"""Records of processes that do not get on: how they look from outside, from inside, and what a stall is.

Like `records.py`, nothing here imports torch: the parent reads all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torchmedic.records import BoxContents, GpuHealth, HostPressure, Phase, PressureRates

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
    """A lock that a thread waits for or holds: the object, how the source names it, and the line that took it.

    `timed` is that the wait was given a time limit. `count` is how many items a queue holds, or how many wait at a
    barrier, `room` how many it can take, or takes. `process` is the child process that is waited for, `shared` that
    other processes can end the wait.
    """

    identity: int
    kind: str
    name: str
    file: str = ""
    line: int = 0
    owner: int | None = None
    timed: bool | None = None
    count: int | None = None
    room: int | None = None
    process: int | None = None
    shared: bool = False


class LockFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose existence, or whose lock, a thread asks for again and again.

    `age` is in seconds. `writer` is the process number that it begins with, if it does. `holder` is the process that
    has a lock on it, with its command line. `by_kernel` is that only such a lock matters, and not that the file exists.
    """

    path: str
    age: float
    writer: int | None = None
    writer_lives: bool = False
    by_kernel: bool = False
    holder: int = 0
    command: str = ""


class PyThread(msgspec.Struct, frozen=True, kw_only=True):
    """A thread as Python shows it, innermost frame first.

    `samples` are the positions of its innermost user frame in several looks: all equal means that it did not move.
    `lock_file` is a file for whose disappearance it waits in a loop.
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
    lock_file: LockFile | None = None

    @property
    def moved(self) -> bool:
        return len(set(self.samples)) > 1

    @property
    def user_frame(self) -> PyFrame | None:
        """The innermost of the user's; what lies outside of the start of a forked process is its parent's."""
        for frame in self.frames:
            if frame.user:
                return frame
            if frame.function == "_bootstrap" and frame.file.endswith("multiprocessing/process.py"):
                break
        return None

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


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The job of several ranks that a process takes part in, by torch.distributed."""

    backend: str
    rank: int
    world_size: int


class MarkView(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the run that the device has come to, or has not: see `observe/device_marks.py`."""

    what: str
    step: int
    file: str
    line: int


class InsideView(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself. Absent where it could not answer, because the GIL is held, say.

    `threads_at_fork` is how many threads the parent had when this process was forked. `item` is the dataset item
    that a worker is reading, `batches` how many batches came while we looked, of `requests` asked for. `empty_loader`
    is what is known of a loader that had none. `by_signal` is that it could not answer, and faulthandler wrote its
    stacks: one look, no more. `partial` is that the device has not answered yet.

    `compiles` are the seconds that earlier compilations took, `state_bytes` the size of what is being saved, `tunes`
    whether cuDNN tries its algorithms out. `architectures` are those that this torch has code for, `gpus` the GPUs in
    use with their compute capability.
    `mark_made` and `mark_due` are the last mark that the device made and the next one, `marks_moved` whether it made
    any while we looked.
    """

    pid: int
    time: float
    threads: tuple[PyThread, ...] = ()
    loaders: tuple[LoaderView, ...] = ()
    torch_threads: int | None = None
    forked: bool = False
    threads_at_fork: int | None = None
    device_busy: bool | None = None
    allocator_retries: int | None = None
    allocator_retry_rate: float | None = None
    loop: LoopView | None = None
    item: str = ""
    batches: int = 0
    requests: int = 0
    empty_loader: str = ""
    by_signal: bool = False
    partial: bool = False
    job: JobView | None = None
    compiles: tuple[float, ...] = ()
    state_bytes: int | None = None
    tunes: bool = False
    architectures: tuple[str, ...] = ()
    gpus: tuple[tuple[str, tuple[int, int]], ...] = ()
    mark_made: MarkView | None = None
    mark_due: MarkView | None = None
    marks_moved: bool | None = None

    @property
    def main(self) -> PyThread | None:
        return next((thread for thread in self.threads if thread.main), None)


class LoopView(msgspec.Struct, frozen=True, kw_only=True):
    """The innermost loop of the user's that the main thread is in, over several looks.

    `unchanged` names what its exits read, where all of that stayed the same and nothing in every round could change
    it; `values` shows it. `hopeless` is that the branches that could change it read nothing that changes either.
    """

    file: str
    line: int
    end_line: int
    code: str
    kind: Literal["while", "for"]
    endless: bool = False
    unchanged: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    hopeless: bool = False
    iterates: str = ""
    empty_iterable: bool = False


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another process of the same run that may be a rank of the same job: from outside, and what it says of itself.

    `asked` is that it listens, so that it has an answer unless it came too late.
    """

    process: ProcessView
    asked: bool = False
    inside: InsideView | None = None
    updates: int | None = None


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the weights of a hung process could be saved, and where, or why not."""

    pid: int
    path: str = ""
    refused: str = ""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run that has not got on for longer than its phase ever took.

    `pid` is the process whose progress is missing; `processes` are it, its children and theirs. `still` says for how
    many seconds no step or phase has ended, `usual` what the longest such time was before, None in the first steps.
    `ended` are wait statuses of processes that are gone, `mute` are those that listen and did not answer. `attached` is
    that the run is not torchmedic's own. `peers` are the other processes of the run.
    `outsiders` are processes at the other ends of its pipes and sockets, `above` its parent and the parents of that.
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
    host: HostPressure | None = None
    pressure: PressureRates | None = None
    gpu: GpuHealth | None = None
    ended: dict[int, int] = {}
    mute: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    outsiders: tuple[ProcessView, ...] = ()
    above: tuple[int, ...] = ()
    peers: tuple[Peer, ...] = ()

    def process(self, pid: int) -> ProcessView | None:
        return next((process for process in self.processes if process.pid == pid), None)

    @property
    def view(self) -> ProcessView | None:
        return self.process(self.pid)

    @property
    def inner(self) -> InsideView | None:
        return self.inside.get(self.pid)

    @property
    def thread(self) -> PyThread | None:
        """The main thread of the process that does not get on, as Python shows it."""
        return self.inner.main if self.inner is not None else None
