"""Room for the first word of a DataLoader worker whose memory has ended in small pieces.

Rows or tokens by the million fill a limited address space to the last byte. Then torch's own handler has no memory to
begin with, and Python may never get out of it: it tries again and again to note where it was. So what was set aside for
last words is given up as soon as the exception has left the user's own code, by code that takes no memory itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import FrameType, GeneratorType, TracebackType
from typing import Any

from torch.utils import data
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _DatasetKind

from torchmedic.contained import contained
from torchmedic.observe.failures import hostile_exceptions
from torchmedic.observe.memory import headroom
from torchmedic.source.user_code import PACKAGE

_LOADING = os.path.dirname(os.path.abspath(data.__file__)) + os.sep

_stream: list[FrameType] = []  # the frame of the generator that is being read from


def install() -> None:
    original: Callable[..., Any] = _DatasetKind.create_fetcher

    @functools.wraps(original)
    def create_fetcher(*args: Any, **kwargs: Any) -> Any:
        _stream.clear()
        fetcher = original(*args, **kwargs)
        _guard(fetcher)
        return fetcher

    _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]


@contained("observe.worker")
def _guard(fetcher: Any) -> None:
    """Only in a worker with a limit of its own. Any other worker is killed and raises no exception."""
    if get_worker_info() is None or (headroom.address_limit() is None and headroom.data_limit() is None):
        return
    source = getattr(fetcher, "dataset_iter", None)
    if type(source) is GeneratorType and source.gi_frame is not None:
        _stream[:] = [source.gi_frame]
        fetcher.dataset_iter = _Stream(source)
    fetcher.fetch = _guarded(fetcher.fetch)


def _guarded(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    release = headroom.release

    @functools.wraps(fetch)
    def guarded(index: Any) -> Any:
        try:
            return fetch(index)
        except MemoryError:
            release()
            raise

    return guarded


class _Stream:
    """A generator whose frame is kept when its memory ends: there may be none to note it in the traceback."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._source)
        except MemoryError:
            headroom.release()
            raise
        except BaseException:
            _stream.clear()  # what it held goes now, as it would have without us
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@contained("observe.worker")
def complete_traceback(error: BaseException) -> None:
    """Add the line of a generator to the traceback, where Python had no memory to note it."""
    if not isinstance(error, MemoryError):
        return
    hostile_exceptions.mend(error)
    frame, tb = _stream.pop() if _stream else None, error.__traceback__
    if frame is None or frame in hostile_exceptions.frames(error):
        return
    while tb is not None and tb.tb_next is not None and _is_around(tb.tb_next.tb_frame):
        tb = tb.tb_next
    if tb is not None:
        tb.tb_next = TracebackType(tb.tb_next, frame, frame.f_lasti, frame.f_lineno)


def _is_around(frame: FrameType) -> bool:
    """Whether a frame belongs to the code that reads from the generator."""
    return frame.f_code.co_filename.startswith((_LOADING, PACKAGE))
