"""Which threads of Python have started and ended, and where: a thread that has ended leaves nothing behind.

`threading` keeps its threads in two private dicts: an entry comes when a thread is started, in the thread that starts
it, and another one goes when a thread ends. These dicts are replaced by dicts that note both. It costs some
microseconds per thread, and nothing in between.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from torchmedic.contained import contained
from torchmedic.records.inside import EndedThread
from torchmedic.source.user_code import is_user_file, user_frame

_MAX_THREADS = 256


class _Noting(dict[Any, Any]):
    """A dict that tells of entries that come and go."""

    def __init__(self, content: dict[Any, Any], came: Callable[[Any, Any], object], went: Callable[[Any], object]):
        super().__init__(content)
        self._came = came
        self._went = went

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._came(key, value)

    def __delitem__(self, key: Any) -> None:
        thread = self.get(key)
        super().__delitem__(key)
        self._went(thread)


class ThreadLog:
    """The last threads that have started or ended."""

    def __init__(self) -> None:
        self._started: dict[int, EndedThread] = {}  # by the identity of the thread object
        self._ended: deque[EndedThread] = deque(maxlen=_MAX_THREADS)

    def install(self) -> None:
        threading._limbo = _Noting(threading._limbo, self._starts, _nothing)  # type: ignore[attr-defined]
        threading._active = _Noting(threading._active, _nothing, self._ends)  # type: ignore[attr-defined]

    def ended(self) -> tuple[EndedThread, ...]:
        """The threads that ran code of the user's and have ended, the oldest first."""
        return tuple(self._ended)

    @contained("observe.threads")
    def _starts(self, thread: Any, _: Any) -> None:
        target = getattr(thread, "_target", None) or type(thread).run
        code = getattr(getattr(target, "__func__", target), "__code__", None)
        if code is None or not is_user_file(code.co_filename):
            return
        frame = user_frame(sys._getframe())
        if len(self._started) > _MAX_THREADS:
            self._started.clear()
        self._started[id(thread)] = EndedThread(
            name=thread.name,
            target=getattr(target, "__qualname__", code.co_name),
            file=code.co_filename,
            line=code.co_firstlineno,
            started_file=frame.f_code.co_filename if frame is not None else "",
            started_line=frame.f_lineno if frame is not None else 0,
            started=time.time(),
        )

    @contained("observe.threads")
    def _ends(self, thread: Any) -> None:
        known = self._started.pop(id(thread), None)
        if known is not None:
            self._ended.append(replace(known, ended=time.time()))


def _nothing(*_: Any) -> None:
    return None
