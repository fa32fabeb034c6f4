"""The main thread is asked whether it runs Python code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from torchmedic.observe.inside.heartbeat import Heartbeat

LOOKS = 6


def spin(thread: threading.Thread) -> None:
    while thread.is_alive():
        pass


@pytest.mark.parametrize(("work", "runs"), [(spin, True), (lambda thread: thread.join(), False)])
def test_a_loop_is_told_from_a_wait(work: Callable[[threading.Thread], None], runs: bool) -> None:
    heart = Heartbeat()
    seen: list[bool] = []

    def look() -> None:
        time.sleep(0.1)
        for _ in range(LOOKS):
            seen.append(heart.beats())
            time.sleep(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    work(thread)
    thread.join()
    assert any(seen[1:]) is runs, seen
