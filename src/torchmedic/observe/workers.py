"""What a DataLoader worker saw of its own exception, sent along with it.

A worker turns its exception into text, and the main process raises a new one. The live frames, the dataset index and
the sample are gone by then; so they are read where they still exist and travel as one more attribute of torch's own
`ExceptionWrapper`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from torchmedic.contained import contained
from torchmedic.observe.frames import is_user_file
from torchmedic.records import StackFrame, WorkerFailure

ATTRIBUTE = "_torchmedic_worker_failure"


def install() -> None:
    _wrap_init()
    _wrap_reraise()


def failure_of(error: BaseException) -> WorkerFailure | None:
    """The worker's own view of an exception that was raised again in the main process."""
    found = getattr(error, ATTRIBUTE, None)
    return found if isinstance(found, WorkerFailure) else None


def _wrap_init() -> None:
    original: Callable[..., None] = ExceptionWrapper.__init__

    @functools.wraps(original)
    def __init__(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, *args, **kwargs)
        _note(wrapper)

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
def _note(wrapper: Any) -> None:
    import sys

    error = sys.exception()
    if error is None:
        return
    info = torch.utils.data.get_worker_info()
    setattr(wrapper, ATTRIBUTE, describe(error, None if info is None else info.id))


@contained("observe.worker")
def _hand_over(wrapper: Any, error: BaseException) -> None:
    found = getattr(wrapper, ATTRIBUTE, None)
    if found is not None:
        setattr(error, ATTRIBUTE, found)


def describe(error: BaseException, worker: int | None) -> WorkerFailure:
    """Read everything that will be gone once the frames are: works in a worker and in the main process."""
    entries = list(_walk(error.__traceback__))
    fetch = next((frame for frame, _ in entries if frame.f_code.co_name == "fetch"), None)
    batch = None if fetch is None else fetch.f_locals.get("possibly_batched_index")
    samples = None if fetch is None else fetch.f_locals.get("data")
    index = _failing_index(entries, fetch, batch)
    last_user = next((entry for entry in reversed(entries) if is_user_file(entry[0].f_code.co_filename)), None)
    return WorkerFailure(
        pid=os.getpid(),
        worker=worker,
        exception=type(error).__name__,
        message=str(error)[:2000],
        stage="other" if fetch is None else "collate" if samples is not None else "sample",
        index=plain(index),
        batch_indices=tuple(plain(item) for item in batch[:1024]) if isinstance(batch, list | tuple) else (),
        frames=tuple(
            StackFrame(file=frame.f_code.co_filename, line=line.tb_lineno, function=frame.f_code.co_name)
            for frame, line in reversed(entries)
        ),
        columns=_columns(last_user[1]) if last_user else (1, 1),
        sample_shapes=tuple(shape_of(sample) for sample in samples[:1024]) if isinstance(samples, list) else (),
    )


def _walk(tb: TracebackType | None) -> Any:
    while tb is not None:
        yield tb.tb_frame, tb
        tb = tb.tb_next


def _columns(tb: TracebackType) -> tuple[int, int]:
    positions = list(tb.tb_frame.f_code.co_positions())
    line, end_line, column, end_column = positions[tb.tb_lasti // 2]
    if column is None or end_column is None or line != end_line:
        return (1, 1)
    return (column + 1, end_column + 1)


def _failing_index(entries: list[tuple[FrameType, Any]], fetch: FrameType | None, batch: Any) -> Any:
    """The index that was being read: the loop variable of torch's fetcher, or the argument of `__getitem__`."""
    if fetch is None:
        return None
    below = False
    for frame, _ in entries:
        below = below or frame is fetch
        if below and "idx" in frame.f_locals and not is_user_file(frame.f_code.co_filename):
            return frame.f_locals["idx"]
        if below and frame.f_code.co_name == "__getitem__" and frame.f_code.co_argcount >= 2:
            return frame.f_locals.get(frame.f_code.co_varnames[1])
    return None if isinstance(batch, list | tuple) else batch


def plain(value: Any) -> Any:
    """An index as something that can be written to JSON."""
    if isinstance(value, int | str | float | bool) or value is None:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return value.item()
    return repr(value)[:200]


def shape_of(sample: Any, depth: int = 3) -> str:
    """The shape of a sample as a person would write it: `([3, 32, 32], int)`."""
    if isinstance(sample, torch.Tensor) or (hasattr(sample, "shape") and hasattr(sample, "dtype")):
        return str(list(sample.shape))
    if depth and isinstance(sample, dict):
        return "{" + ", ".join(f"{key}: {shape_of(item, depth - 1)}" for key, item in list(sample.items())[:8]) + "}"
    if depth and isinstance(sample, list | tuple):
        if isinstance(sample, list) and sample and isinstance(sample[0], int | float | str):
            return f"list of {len(sample)}"
        return "(" + ", ".join(shape_of(item, depth - 1) for item in sample[:8]) + ")"
    return type(sample).__name__
