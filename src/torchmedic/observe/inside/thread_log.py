"""Which threads of Python have started and ended, and where: a thread that has ended leaves nothing behind.

`threading` keeps its threads in two private dicts: an entry comes when a thread is started, in the thread that starts
it, and another one goes when a thread ends. These dicts are replaced by dicts that note both. It costs some
microseconds per thread, and nothing in between.

What raises in a thread is noted too: `sys.exit()` ends a thread in silence, and the task of a pool keeps its exception
until somebody asks for its result.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing.pool
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from msgspec.structs import replace

from torchmedic.contained import contained, text_of
from torchmedic.observe.failures.hostile_exceptions import traceback_of
from torchmedic.records.inside import EndedThread
from torchmedic.source.user_code import is_user_file, user_frame

_MAX_THREADS = 256
_MAX_ERROR_LETTERS = 200


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
        self._watch_threads()
        self._watch_pools()

    def ended(self) -> tuple[EndedThread, ...]:
        """The threads that ran code of the user's and have ended, the oldest first; failed tasks of asyncio last."""
        return (*self._ended, *(_failed_tasks() or ()))

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

    def _watch_threads(self) -> None:
        previous = threading.excepthook

        def excepthook(args: Any) -> None:
            self._thread_failed(args.thread, args.exc_value)
            previous(args)

        threading.excepthook = excepthook

    def _watch_pools(self) -> None:
        set_exception = concurrent.futures.Future.set_exception
        set_result = multiprocessing.pool.ApplyResult._set  # type: ignore[attr-defined]

        @functools.wraps(set_exception)
        def watched(future: Any, error: BaseException | None) -> None:
            self._task_failed(error)
            set_exception(future, error)

        @functools.wraps(set_result)
        def _set(result: Any, number: int, outcome: tuple[bool, Any]) -> None:
            if not outcome[0]:
                self._task_failed(outcome[1])
            set_result(result, number, outcome)

        concurrent.futures.Future.set_exception = watched  # type: ignore[method-assign, assignment]
        multiprocessing.pool.ApplyResult._set = _set  # type: ignore[attr-defined]

    @contained("observe.threads")
    def _thread_failed(self, thread: Any, error: BaseException | None) -> None:
        known, places = self._started.get(id(thread)), _user_places(error)
        if known is not None and places and error is not None:
            self._started[id(thread)] = _with_error(known, error, *places[-1])

    @contained("observe.threads")
    def _task_failed(self, error: BaseException | None) -> None:
        places = _user_places(error)
        if not places or error is None:
            return
        code = places[0][0].f_code
        task = EndedThread(
            name=threading.current_thread().name,
            target=code.co_qualname,
            file=code.co_filename,
            line=code.co_firstlineno,
            ended=time.time(),
        )
        self._ended.append(_with_error(task, error, *places[-1]))

    @contained("observe.threads")
    def _ends(self, thread: Any) -> None:
        known = self._started.pop(id(thread), None)
        if known is not None:
            self._ended.append(replace(known, ended=time.time()))


@contained("observe.threads")
def _failed_tasks() -> list[EndedThread]:
    """The tasks of asyncio whose exception nobody has asked for; to look at it here does not count as asking."""
    tasks = sys.modules.get("asyncio.tasks")
    kept: Any = getattr(tasks, "_scheduled_tasks", None) or getattr(tasks, "_all_tasks", ())
    found: list[EndedThread] = []
    try:
        known_tasks = list(kept)
    except RuntimeError:  # a loop that is at work has changed it
        return found
    for task in known_tasks:
        error, code = getattr(task, "_exception", None), getattr(task.get_coro(), "cr_code", None)
        places = _user_places(error) if getattr(task, "_log_traceback", False) else []
        if places and error is not None and code is not None:
            known = EndedThread(
                name=task.get_name(),
                target=code.co_qualname,
                file=code.co_filename,
                line=code.co_firstlineno,
                awaitable=True,
            )
            found.append(_with_error(known, error, *places[-1]))
    return found


def _user_places(error: BaseException | None) -> list[tuple[FrameType, int]]:
    """The frames of the user's that an exception has passed, with their lines, the outermost first."""
    tb, found = traceback_of(error) if error is not None else None, []
    while tb is not None:
        if is_user_file(tb.tb_frame.f_code.co_filename):
            found.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    return found


def _with_error(thread: EndedThread, error: BaseException, frame: FrameType, line: int) -> EndedThread:
    text = f"{type(error).__name__}: {text_of(error)}"[:_MAX_ERROR_LETTERS]
    return replace(thread, error=text, error_file=frame.f_code.co_filename, error_line=line)


def _nothing(*_: Any) -> None:
    return None
