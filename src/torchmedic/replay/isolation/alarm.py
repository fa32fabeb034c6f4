"""The end of a replay that runs no operation of torch any more: it goes round in Python, or waits for ever.

What it waits for may not come a second time: a lock that the step holds, an item that it has taken from a queue.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_TICK_SECONDS = 0.5  # between two looks, and between two tries where the code has swallowed the first
_MIN_IDLE_TICKS = 6  # in a row
_MAX_IDLE_SHARE = 0.03  # share of one processor that an idle process takes


class _Flag(threading.Event):
    """One that is set in a replay too."""

    set = threading.Event.set


class Alarm:
    """Raises in the thread that has entered it, if it is still inside at the deadline.

    In the main thread the signals of a timer do it, which also end a wait in C (a lock, a sleep, a read), and take no
    memory of a process that may have none left. Their handler is ours for that time only. In other threads, and where
    there are no such timers, it is raised once the thread is back in Python.
    """

    def __init__(self, deadline: float, error: type[Exception], waits: type[Exception] | None = None) -> None:
        """`waits` is raised before, where the process has done nothing for some seconds."""
        self._deadline = deadline
        self._error = error
        self._waits = waits
        self._used = 0.0  # of the processors, or wanted, at the last tick
        self._idle = 0  # ticks
        self._next = 0.0  # when a tick is due
        self._previous: Any = None
        self._timer: _Timer | None = None
        self._over = _Flag()
        self._is_rung = False  # by the other thread
        self._guard = threading.Lock()  # nothing is raised by the other thread once we have been left

    def __enter__(self) -> Alarm:
        thread = threading.get_ident()
        seconds = max(0.001, self._deadline - time.monotonic())
        if thread == threading.main_thread().ident and sys.platform == "linux":
            self._previous = signal.getsignal(signal.SIGURG)
            if self._previous is not None:  # else C code handles it, and Python could not put that back
                self._used = _processor_time()
                self._next = time.monotonic() + min(seconds, _TICK_SECONDS)
                signal.signal(signal.SIGURG, self._ring)
                self._timer = _timer(threading.get_native_id(), min(seconds, _TICK_SECONDS))
                if self._timer is None:
                    signal.signal(signal.SIGURG, self._previous)
        if self._timer is None:
            with contextlib.suppress(RuntimeError):  # no new thread at the very end of the interpreter
                _thread.start_new_thread(self._watch, (thread, seconds))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.end()
            signal.signal(signal.SIGURG, self._previous)
            return
        with self._guard:
            self._over.set()
        if self._is_rung:
            _take_back()

    def _watch(self, thread: int, seconds: float) -> None:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if self._over.wait(seconds):
            return
        with self._guard:
            if not self._over.is_set():
                self._is_rung = True
                _raise_in(thread, self._error)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now < self._next:
            if callable(self._previous):  # it was not ours
                self._previous(number, frame)
            return
        self._next += _TICK_SECONDS * (1 + (now - self._next) // _TICK_SECONDS)
        if _is_at_its_door(frame):
            return
        if now >= self._deadline:
            raise self._error
        used = _processor_time()
        self._idle = self._idle + 1 if used - self._used < _MAX_IDLE_SHARE * _TICK_SECONDS else 0
        self._used = used
        if self._idle >= _MIN_IDLE_TICKS and self._waits is not None:
            raise self._waits


def _is_at_its_door(frame: FrameType | None) -> bool:
    """Whether an alarm is just being entered or left, which must not be interrupted."""
    doors = (Alarm.__enter__.__code__, Alarm.__exit__.__code__)
    while frame is not None and frame.f_code not in doors:
        frame = frame.f_back
    return frame is not None


def _processor_time() -> float:
    """Seconds of processors that the process has had, and that this thread has waited for one."""
    waited = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat", "rb") as file:
        waited = int(file.read().split()[1])
    return time.process_time() + waited / 1e9


def _raise_in(thread: int, error: type[Exception]) -> None:
    """Raise in another thread as soon as it runs Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


class _TakenBack(Exception):
    pass


def _take_back() -> None:
    """Put an exception of ours in the place of one that may be under way to this thread, and catch it.

    If an exception is taken back by NULL, Python 3.11 goes on to look for one at every call, and a trace function then
    never gets past the first line of a function.
    """
    with contextlib.suppress(_TakenBack):
        _raise_in(threading.get_ident(), _TakenBack)
        while True:
            time.sleep(0)


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_byte * 44),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`: again after, first after; seconds and nanoseconds of each."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("again", "again_ns", "first", "first_ns"))


_SIGEV_THREAD_ID = 4


class _Timer:
    """A timer of the kernel that signals one thread again and again."""

    def __init__(self, libc: Any, number: ctypes.c_void_p) -> None:
        self._libc = libc
        self._number = number

    def end(self) -> None:
        self._libc.timer_delete(self._number)


def _timer(thread: int, seconds: float) -> _Timer | None:
    """Less than a second from now, and at every tick from then on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "timer_create"):  # before glibc 2.34 it is elsewhere
        return None
    event = _Event(number=int(signal.SIGURG), kind=_SIGEV_THREAD_ID, thread=thread)
    number = ctypes.c_void_p()
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(number)) != 0:
        return None
    times = _Times(again_ns=int(_TICK_SECONDS * 1e9), first_ns=int(seconds * 1e9))
    if libc.timer_settime(number, 0, ctypes.byref(times), None) != 0:
        libc.timer_delete(number)
        return None
    return _Timer(libc, number)
