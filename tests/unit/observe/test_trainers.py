"""Which threads are taken for others that train at the same time."""

from __future__ import annotations

import _thread
import threading
import time

import pytest

from torchmedic.observe.step import trainers
from torchmedic.observe.step.trainers import others_train


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    threads: set[int] = set()
    monkeypatch.setattr(trainers, "THREADS", threads)
    return threads


def test_a_thread_that_waits_does_not_train(known: set[int]) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    known |= {threading.get_ident(), thread.ident or 0}
    time.sleep(0.05)
    try:
        assert not others_train()
    finally:
        end.set()
        thread.join()
    assert not others_train()


def test_a_thread_at_work_trains_and_that_of_autograd_is_not_told(known: set[int]) -> None:
    is_over = False
    answers: list[bool] = []

    def work() -> None:
        while not is_over:
            sum(range(99))

    thread = threading.Thread(target=work)
    thread.start()
    known.add(thread.ident or 0)
    try:
        assert others_train()  # also for a thread that has not trained itself
        _thread.start_new_thread(lambda: answers.append(others_train()), ())  # unknown to `threading`
        while not answers:
            time.sleep(0.01)
        assert answers == [False]
    finally:
        is_over = True
        thread.join()
