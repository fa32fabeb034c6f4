"""What is noted of a thread, or of the task of a pool, that an exception has ended in silence."""

from __future__ import annotations

import concurrent.futures
import multiprocessing.pool
import sys
import threading
from collections.abc import Callable

import pytest

from torchmedic.observe.inside.thread_log import ThreadLog
from torchmedic.records.inside import EndedThread


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> ThreadLog:
    owners = {threading: ("_limbo", "_active"), concurrent.futures.Future: ("set_exception",)}
    for owner, names in {**owners, multiprocessing.pool.ApplyResult: ("_set",)}.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    log = ThreadLog()
    log.install()
    return log


def _leaves() -> None:
    sys.exit(3)


def _fails() -> None:
    raise KeyError("label")


def _told(ended: EndedThread) -> tuple[str, str, bool]:
    code = {"_leaves": _leaves, "_fails": _fails}[ended.target].__code__
    return ended.target, ended.error, (ended.error_file, ended.error_line) == (__file__, code.co_firstlineno + 1)


def test_sys_exit_ends_a_thread_in_silence(log: ThreadLog) -> None:
    thread = threading.Thread(target=_leaves)
    thread.start()
    thread.join()
    assert [_told(each) for each in log.ended()] == [("_leaves", "SystemExit: 3", True)]


def test_a_thread_that_ends_by_itself_has_no_error(log: ThreadLog) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert [(each.error, each.error_line) for each in log.ended()] == [("", 0)]


def _of_executor() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(_fails)


def _of_pool() -> None:
    pool = multiprocessing.pool.ThreadPool(1)
    pool.apply_async(_fails).wait()
    pool.close()
    pool.join()


@pytest.mark.parametrize("pooled", [_of_executor, _of_pool])
def test_a_task_keeps_its_exception_to_itself(log: ThreadLog, pooled: Callable[[], None]) -> None:
    pooled()
    assert [_told(each) for each in log.ended()] == [("_fails", "KeyError: 'label'", True)]
