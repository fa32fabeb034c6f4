"""The end of a replay that runs no operation of torch any more: it goes round in Python, or waits for ever."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_AGAIN = 1.0  # seconds to the next try, where the code has swallowed the last
_TRIES = 30


class Alarm:
    """Raises in the thread that has entered it, if it is still inside at the deadline.

    In the main thread a signal does it, which also ends a wait in C (a lock, a sleep, a read). Its handler is ours for
    that time only. Other threads cannot be signalled; there it is raised once they are back in Python.
    """

    def __init__(self, deadline: float, error: type[Exception]) -> None:
        self._deadline = deadline
        self._error = error
        self._over = threading.Event()
        self._guard = threading.Lock()  # nothing is raised once we have been left
        self._previous: Any = None
        self._by_signal = False

    def __enter__(self) -> Alarm:
        self._thread = threading.get_ident()
        if self._thread == threading.main_thread().ident and hasattr(signal, "pthread_kill"):
            self._previous = signal.getsignal(signal.SIGURG)
            if self._previous is not None:  # else C code handles it, and Python could not put that back
                signal.signal(signal.SIGURG, self._ring)
                self._by_signal = True
        with contextlib.suppress(RuntimeError):  # no new thread at the very end of the interpreter
            _thread.start_new_thread(self._watch, ())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._guard:
            self._over.set()
            if self._by_signal:
                signal.signal(signal.SIGURG, self._previous)
            else:
                _raise_in(self._thread, None)  # which may be under way

    def _watch(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        wait = max(0.0, self._deadline - time.monotonic())
        for _ in range(_TRIES if self._by_signal else 1):
            if self._over.wait(wait):
                return
            with self._guard:
                if self._over.is_set():
                    return
                if self._by_signal:
                    signal.pthread_kill(self._thread, signal.SIGURG)
                else:
                    _raise_in(self._thread, self._error)
            wait = _AGAIN

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() < self._deadline:
            if callable(self._previous):  # it was not ours
                self._previous(number, frame)
        elif not _is_at_its_door(frame):
            raise self._error


def _is_at_its_door(frame: FrameType | None) -> bool:
    """Whether an alarm is just being entered or left, which must not be interrupted."""
    doors = (Alarm.__enter__.__code__, Alarm.__exit__.__code__)
    while frame is not None and frame.f_code not in doors:
        frame = frame.f_back
    return frame is not None


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raise in another thread as soon as it runs Python; None takes that back."""
    raised = ctypes.py_object() if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
