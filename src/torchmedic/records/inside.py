"""Records of what a process says of itself: its Python threads, its locks, its loaders, its device.

Like `records/report.py`, nothing here imports torch: the parent reads all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec


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
    """A point of the run that the device has come to, or has not: see `observe/device/device_marks.py`."""

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
