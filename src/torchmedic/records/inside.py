"""Records in which a process describes itself: its Python threads, locks, loaders, device. Nothing imports torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchmedic.records.report import StackFrame


class PyFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A Python frame. `user`: its file is the user's. `code` is the expression that is being evaluated, if known."""

    file: str
    line: int
    function: str
    user: bool = False
    column: int = 1
    end_column: int = 1
    code: str = ""


class LockView(msgspec.Struct, frozen=True, kw_only=True):
    """A lock that a thread waits for or holds: the object, its name in the source, and the line that took it.

    `timed`: the wait has a time limit. `count` is the number of items in a queue, or of threads at a barrier; `room` is
    the capacity of the queue, or the size of the barrier. `process` is the child process that is waited for. `shared`:
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
    """A file whose existence, or whose lock, a thread polls.

    `age` is in seconds. `writer` is the pid at the beginning of the file, if there is one. `holder` is the process that
    has a lock on the file, `command` its command line. `by_kernel`: only such a lock counts, not the file's existence.
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

    `samples` are the positions of its innermost user frame in several looks; if all are equal, the thread did not move.
    `lock_file` is a file that the thread polls until it disappears. `daemon`: the process does not wait for its end.
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
        """The innermost user frame; frames outside the start of a forked process belong to its parent."""
        for frame in self.frames:
            if frame.user:
                return frame
            if frame.function == "_bootstrap" and frame.file.endswith("multiprocessing/process.py"):
                break
        return None

    def calls(self, function: str, file: str = "") -> PyFrame | None:
        """The innermost frame of the named function, in a file whose path contains `file`."""
        return next((each for each in self.frames if each.function == function and file in each.file), None)


class EndedThread(msgspec.Struct, frozen=True, kw_only=True):
    """A thread that has ended: the function that it ran, the line that started it, and the times, in Unix seconds.

    So is a task of a pool, or of asyncio (`awaitable`), that has raised an exception. `error` is the exception that
    ended the function, and `error_line` the line of the user's that raised it.
    """

    name: str
    target: str
    file: str
    line: int
    started_file: str = ""
    started_line: int = 0
    started: float = 0.0
    ended: float = 0.0
    error: str = ""
    error_file: str = ""
    error_line: int = 0
    awaitable: bool = False


class LoaderView(msgspec.Struct, frozen=True, kw_only=True):
    """A DataLoader with workers that is being iterated, as its main process sees it.

    `given` lists, by worker, the dataset items that the worker was given and has not delivered.
    """

    workers: tuple[int, ...]
    given: tuple[tuple[str, ...], ...] = ()


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The torch.distributed job that a process belongs to."""

    backend: str
    rank: int
    world_size: int


class MarkView(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the run that the device has or has not reached: see `observe/device/device_marks.py`."""

    what: str
    step: int
    file: str
    line: int


class InsideView(msgspec.Struct, frozen=True, kw_only=True):
    """A process's description of itself. Absent if it could not answer, for example because the GIL was held.

    `threads_at_fork` is the number of threads of the parent when this process was forked. `item` is the dataset item
    that a worker is reading. `batches` of `requests` batches arrived during the look. `empty_loader` describes a loader
    without batches. `by_signal`: the process could not answer, and faulthandler wrote its stacks once. `partial`: the
    device has not answered yet. `joining` is the job that the process is about to join, in `init_process_group`.
    `logged` is the line of the script that logged the value which a library exchanges now.

    `compiles` lists the seconds of earlier compilations, `state_bytes` is the size of what is being saved. `tunes`:
    cuDNN tries its algorithms. `architectures` are those that this torch has code for, `gpus` the GPUs in use with
    their compute capability. `mark_made` is the last mark that the device reached, `mark_due` the next one;
    `marks_moved`: the device reached a mark during the look.
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
    joining: JobView | None = None
    compiles: tuple[float, ...] = ()
    state_bytes: int | None = None
    tunes: bool = False
    architectures: tuple[str, ...] = ()
    gpus: tuple[tuple[str, tuple[int, int]], ...] = ()
    mark_made: MarkView | None = None
    mark_due: MarkView | None = None
    marks_moved: bool | None = None
    ended_threads: tuple[EndedThread, ...] = ()
    logged: StackFrame | None = None

    @property
    def main(self) -> PyThread | None:
        return next((thread for thread in self.threads if thread.main), None)


class LoopView(msgspec.Struct, frozen=True, kw_only=True):
    """The innermost user loop that the main thread is in, over several looks.

    `unchanged` names what the exits of the loop read, if all of it stayed the same and nothing that runs in every round
    can change it; `values` shows the values. It was the same `unchanged_for` seconds before, when it was asked for.
    `hopeless`: the branches that could change it read nothing that changes. `receding` names the numbers that the exits
    compare, if from look to look they only moved away from what would end the loop; `values` then shows them.
    """

    file: str
    line: int
    end_line: int
    code: str
    kind: Literal["while", "for"]
    endless: bool = False
    unchanged: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    unchanged_for: float = 0.0
    hopeless: bool = False
    receding: tuple[str, ...] = ()
