"""What a DataLoader worker saw of its own exception, sent along with it.

A worker turns its exception into text, and the main process raises a new one. The live frames, the dataset index and
the sample are gone by then; so they are read where they still exist, and travel as one more attribute of torch's own
`ExceptionWrapper`. Nothing is done before an exception has been raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import linecache
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Literal

import msgspec
import torch
from torch._utils import ExceptionWrapper

from torchmedic.contained import contained, is_short
from torchmedic.observe.failures import forked_look, worker_reserve
from torchmedic.observe.failures.exceptions import undisturbed
from torchmedic.observe.failures.shown_tracebacks import without_our_frames
from torchmedic.observe.failures.sketch import plain, shape_of, text_of, variables_of
from torchmedic.observe.memory import headroom
from torchmedic.observe.step.items import through_subsets
from torchmedic.records import Diagnosis, StackFrame, WorkerFailure
from torchmedic.source.user_code import is_user_file

ATTRIBUTE = "_torchmedic_worker_failure"

_FETCH = os.path.join("torch", "utils", "data", "_utils", "fetch.py")
_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_STORAGE = os.path.join("torch", "storage.py")
_MAX_SAMPLES = 1024
_SENDING_BYTES = 32 << 20  # that it may take to send a batch or an exception
# A runaway recursion has a thousand frames; those at its ends tell it all.
_MAX_INNER_FRAMES, _MAX_OUTER_FRAMES = 100, 20

Entry = tuple[FrameType, TracebackType]
Explain = Callable[[BaseException, WorkerFailure], Diagnosis | None]


def install(explain: Explain, end_copy: Callable[[], None]) -> None:
    """Have torch's wrapper of a worker's exception carry what the worker saw.

    Args:
        explain: Explains a worker that has run out of memory, in a copy of it.
        end_copy: Called in the copy before it goes.
    """
    _wrap_init(explain, end_copy)
    _wrap_reraise()
    worker_reserve.install()


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel end this forked worker when its main process is killed.

    A worker looks for its parent only between two batches, so one that is stuck in a dataset would stay for ever. The
    kernel does it at once, but it goes by the thread that forked: only the main thread lives as long as its process.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None or os.getppid() != parent.pid or not _forked_by_main_thread():
        return  # the child of a fork server, for example
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _forked_by_main_thread() -> bool:
    """Whether the main thread called fork: after a fork the calling thread is the main one, under its old name."""
    return threading.main_thread().name == "MainThread"


def failure_of(error: BaseException) -> WorkerFailure | None:
    """The worker's own view of an exception that was raised again in the main process."""
    found = getattr(error, ATTRIBUTE, None)
    return found if isinstance(found, WorkerFailure) else None


def _wrap_init(explain: Explain, end_copy: Callable[[], None]) -> None:
    original: Callable[..., None] = ExceptionWrapper.__init__

    @functools.wraps(original)
    def __init__(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        _prepare()
        original(wrapper, *args, **kwargs)
        _note(wrapper, explain, end_copy)

    ExceptionWrapper.__init__ = __init__  # type: ignore[method-assign, assignment]


def _wrap_reraise() -> None:
    original: Callable[..., None] = ExceptionWrapper.reraise

    @functools.wraps(original)
    def reraise(wrapper: Any) -> None:
        try:
            original(wrapper)
        except BaseException as error:
            _hand_over(wrapper, error)
            raise

    ExceptionWrapper.reraise = reraise  # type: ignore[method-assign]


@contained("observe.worker")
def _prepare() -> None:
    """Make room, and clean the traceback, before torch writes it down as text."""
    error = sys.exception()
    if isinstance(error, MemoryError | RuntimeError | OSError):
        headroom.release()  # there may be no room for a single word
    if error is not None:
        without_our_frames(error)


@contained("observe.worker")
def _note(wrapper: Any, explain: Explain, end_copy: Callable[[], None]) -> None:
    error = sys.exception()
    if error is None:
        return
    worker_reserve.complete_traceback(error)
    info = torch.utils.data.get_worker_info()
    worker = None if info is None else info.id
    is_exhausted = worker is not None and is_short(error)
    if is_exhausted:
        headroom.widen(_SENDING_BYTES)
    told = _explained(error, worker, explain, end_copy) if worker is not None and is_exhausted else b""
    # As bytes, so that the wrapper can be unpickled where torchmedic cannot be imported.
    setattr(wrapper, ATTRIBUTE, told or msgspec.json.encode(describe(error, worker)))


@contained("observe.worker")
def _explained(error: BaseException, worker: int, explain: Explain, end_copy: Callable[[], None]) -> bytes:
    """The failure with its diagnosis, found by a copy of this worker: the worker itself has no memory left for it."""

    def look() -> bytes:
        failure = describe(error, worker)
        found = explain(error, failure)
        return msgspec.json.encode(msgspec.structs.replace(failure, diagnosis=found))

    with undisturbed():
        return forked_look.seen_by_copy(look, end_copy, *_time_left())


def _time_left() -> list[float]:
    """Half of the loader's `timeout`, if it has one: after all of it the exception would come too late."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # a forked process has the frames of its parent below its own
        loader = frame.f_locals.get("loader") if frame.f_code.co_filename.endswith(_LOADER) else None
        if loader is not None and loader.timeout:
            return [loader.timeout / 2]
        frame = frame.f_back
    return []


@contained("observe.worker")
def _hand_over(wrapper: Any, error: BaseException) -> None:
    found = getattr(wrapper, ATTRIBUTE, None)
    if isinstance(found, bytes):
        # Past a `__setattr__` of the user's own.
        BaseException.__setattr__(error, ATTRIBUTE, msgspec.json.decode(found, type=WorkerFailure))


def describe(error: BaseException, worker: int | None) -> WorkerFailure:
    """Read everything that will be gone once the frames are: works in a worker and in the main process."""
    entries = list(_walk(error.__traceback__))
    if isinstance(error.__cause__, StopIteration) and str(error) == "generator raised StopIteration":
        entries += _walk(error.__cause__.__traceback__)  # Python replaces it at the edge of the generator
    start = next((at for at, (frame, _) in enumerate(entries) if is_fetch(frame.f_code.co_filename)), None)
    fetch = None if start is None else entries[start]
    entries = entries[start:]
    known = {} if fetch is None else fetch[0].f_locals
    dataset = getattr(known.get("self"), "dataset", None)
    batch = known.get("possibly_batched_index")
    stage = _stage(fetch)
    samples = known.get("data")
    last_user = next((entry for entry in reversed(entries) if is_user_file(entry[0].f_code.co_filename)), None)
    return WorkerFailure(
        pid=os.getpid(),
        worker=worker,
        exception=type(error).__name__,
        message=text_of(error),
        stage=stage,
        index=plain(_failing_index([frame for frame, _ in entries], batch, dataset)) if stage == "sample" else None,
        batch_indices=_indices(through_subsets(dataset, batch)),
        frames=tuple(
            StackFrame(file=frame.f_code.co_filename, line=tb.tb_lineno or 0, function=frame.f_code.co_name)
            for frame, tb in reversed(
                entries
                if len(entries) <= _MAX_INNER_FRAMES + _MAX_OUTER_FRAMES
                else entries[:_MAX_OUTER_FRAMES] + entries[-_MAX_INNER_FRAMES:]
            )
        ),
        columns=_columns(last_user[1]) if last_user else (1, 1),
        sample=variables_of(last_user[0]) if last_user else "",
        sample_shapes=tuple(shape_of(sample) for sample in samples[:_MAX_SAMPLES])
        if isinstance(samples, list | tuple)
        else (),
        shared=shared_bytes([frame for frame, _ in entries]),
        sizes=headroom.sizes_and_limits(),
    )


def shared_bytes(frames: list[FrameType]) -> int:
    """How much was to be put into shared memory, by the frames of torch's storages, outermost first; 0 if none was."""
    for frame in reversed(frames):
        code = frame.f_code
        if not code.co_filename.endswith(_STORAGE):
            continue
        known = frame.f_locals
        with contextlib.suppress(Exception):
            if code.co_name == "_new_shared" and "cls" in known:
                return int(known["size"])
            if "share" in code.co_name or code.co_name == "wrapper":
                return int(known["self"].nbytes())
    return 0


def is_fetch(filename: str) -> bool:
    """Whether this is the file of torch in which a batch is read from a dataset."""
    return filename.endswith(_FETCH)


def _walk(tb: TracebackType | None) -> Any:
    while tb is not None:
        yield tb.tb_frame, tb
        tb = tb.tb_next


def _columns(tb: TracebackType) -> tuple[int, int]:
    """The failing expression, as bytes of its line counted from 1; (1, 1) where it is not on one line."""
    for index, (line, end_line, column, end_column) in enumerate(tb.tb_frame.f_code.co_positions()):
        if index == tb.tb_lasti // 2:
            if column is None or end_column is None or line != end_line:
                break
            return (column + 1, end_column + 1)
    return (1, 1)


def _stage(fetch: Entry | None) -> Literal["sample", "collate", "other"]:
    if fetch is None:
        return "other"
    return (
        "collate"
        if "collate_fn(" in linecache.getline(fetch[0].f_code.co_filename, fetch[1].tb_lineno or 0)
        else "sample"
    )


def _indices(batch: Any) -> tuple[Any, ...]:
    """The indices of a batch; none of an IterableDataset, whose sampler yields only None."""
    if not isinstance(batch, list | tuple) or all(item is None for item in batch):
        return ()
    return tuple(plain(item) for item in batch[:_MAX_SAMPLES])


def index_under_way(frames: list[FrameType]) -> Any:
    """The index that a process is reading now, by its frames, the innermost first."""
    outer = next((at for at, frame in enumerate(frames) if is_fetch(frame.f_code.co_filename)), None)
    if outer is None:
        return None
    if frames[outer].f_code.co_name != "fetch" and outer + 1 < len(frames):
        outer += 1  # from its comprehension, a frame of its own before Python 3.12
    known = frames[outer].f_locals
    dataset = getattr(known.get("self"), "dataset", None)
    return _failing_index(frames[outer::-1], known.get("possibly_batched_index"), dataset)


def _failing_index(frames: list[FrameType], batch: Any, dataset: Any) -> Any:
    """The index that was being read, of the user's own dataset: an argument of `__getitem__`, or a loop variable."""
    wanted = through_subsets(dataset, batch)
    if not isinstance(wanted, list | tuple):
        return wanted
    for frame in frames:
        code = frame.f_code
        # The comprehension of torch's fetcher, which has no frame of its own since Python 3.12.
        if is_fetch(code.co_filename) and "idx" in frame.f_locals:
            return through_subsets(dataset, frame.f_locals["idx"])
        if code.co_name == "__getitem__" and code.co_argcount >= 2:
            index = frame.f_locals.get(code.co_varnames[1])
            if not is_user_file(code.co_filename):
                return through_subsets(frame.f_locals.get("self"), index)
            # A method of the user's may have put something else into its variable since.
            return index if any(index is item or plain(index) == plain(item) for item in wanted) else None
    return None
