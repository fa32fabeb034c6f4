"""What runs too long is ended wherever it is, and nothing is raised once it is left."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from torchmedic.replay.isolation import alarm
from torchmedic.replay.isolation.alarm import Alarm


class Late(Exception):
    pass


def _spin() -> None:
    while True:
        pass


def _wait() -> None:
    queue.Queue[int]().get()


def _sleep() -> None:
    time.sleep(1000)


def _swallow_the_first() -> None:
    with contextlib.suppress(Late):
        _spin()
    _spin()


@pytest.mark.parametrize("endless", [_spin, _wait, _sleep, _swallow_the_first])
def test_the_main_thread_is_ended_wherever_it_is(endless: Callable[[], None]) -> None:
    before = signal.getsignal(signal.SIGURG)
    with pytest.raises(Late), Alarm(time.monotonic() + 0.05, Late):
        endless()
    assert signal.getsignal(signal.SIGURG) is before


class Idle(Exception):
    pass


def test_who_waits_for_ever_is_ended_long_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "_TICK_SECONDS", 0.05)
    with pytest.raises(Idle), Alarm(time.monotonic() + 1000, Late, Idle):
        _wait()
    with pytest.raises(Late), Alarm(time.monotonic() + 1, Late, Idle):
        _spin()


def test_another_thread_is_ended_in_python() -> None:
    ended = []

    def work() -> None:
        try:
            with Alarm(time.monotonic() + 0.05, Late):
                _spin()
        except Late:
            ended.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert ended == [True]


def _go_round(end: float) -> None:
    # Not in the `with` itself: since Python 3.12 what a signal raises at the end of a round passes by its handlers.
    while time.monotonic() < end:
        pass


def test_what_is_over_is_left_alone() -> None:
    """Also where the end and the deadline fall together."""
    for turn in range(300):
        started = time.monotonic()
        with contextlib.suppress(Late), Alarm(started + 0.001, Late):
            _go_round(started + 0.001 + (turn % 7 - 3) * 1e-4)
        assert signal.getsignal(signal.SIGURG) is not None
    time.sleep(0.05)  # whatever was under way would be raised here
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


def test_a_handler_of_the_users_own_is_called_and_stays() -> None:
    got: list[int] = []

    def theirs(number: int, _: object) -> None:
        got.append(number)

    before = signal.signal(signal.SIGURG, theirs)
    try:
        with Alarm(time.monotonic() + 100, Late):
            signal.raise_signal(signal.SIGURG)
        assert (got, signal.getsignal(signal.SIGURG)) == ([signal.SIGURG], theirs)
    finally:
        signal.signal(signal.SIGURG, before)


TRACED_AFTER_AN_ALARM = """
import contextlib, sys, threading, time
from torchmedic.replay.isolation.alarm import Alarm

def work(length):
    with contextlib.suppress(TimeoutError), Alarm(time.monotonic() + 0.05, TimeoutError):
        time.sleep(length)

for length in (0, 0.2):
    thread = threading.Thread(target=work, args=(length,))
    thread.start()
    thread.join()

sys.settrace(lambda frame, event, argument: None)
print(time.strptime("2026", "%Y").tm_year)
"""


def test_nothing_is_left_under_way_to_a_thread() -> None:
    """Python 3.11 would stand still in the first function that is traced."""
    done = subprocess.run([sys.executable, "-c", TRACED_AFTER_AN_ALARM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2026\n", done.stderr
