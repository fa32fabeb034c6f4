"""What a process knows of the things that its own threads wait for."""

from __future__ import annotations

import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from processes import awaited

from torchmedic.observe.inside.lock_files import awaited_file
from torchmedic.observe.inside.locks import waited_for
from torchmedic.records.inside import InsideView, LockFile, LockView, PyThread
from torchmedic.supervise.proc.file_locks import with_holders


@contextmanager
def _thread(wait: Callable[[], Any]) -> Iterator[threading.Thread]:
    def run() -> None:
        with suppress(Exception):  # some waits are ended in ways that raise
            wait()

    started = threading.Thread(target=run, daemon=True)
    started.start()
    yield started


def _frames(thread: threading.Thread) -> list[FrameType]:
    frame = sys._current_frames().get(thread.ident or 0)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _seen(thread: threading.Thread, look: Callable[[list[FrameType]], Any]) -> Any:
    return awaited(lambda: look(_frames(thread)))


def _wanted(
    wait: Callable[[], Any], end: Callable[[], Any], look: Callable[[list[FrameType]], Any] = waited_for
) -> LockView:
    with _thread(wait) as thread:
        found = _seen(thread, look)
        end()
        thread.join()
        assert isinstance(found, LockView)
        return found


def test_queues_tell_how_full_they_are() -> None:
    full: queue.Queue[int] = queue.Queue(2)
    full.put(1)
    full.put(2)
    found = _wanted(lambda: full.put(3), full.get)
    assert (found.kind, found.count, found.room, found.timed, found.shared) == ("queue put", 2, 2, False, False)
    assert _wanted(lambda: full.put(4, timeout=30), full.get).timed is True

    between = multiprocessing.get_context("fork").Queue(1)
    between.put(1)
    found = _wanted(lambda: between.put(2), between.get)
    assert (found.kind, found.count, found.room, found.shared) == ("queue put", 1, 1, True)
    between.get()
    between.close()


def test_a_queue_that_an_iterator_reads_goes_by_its_name() -> None:
    tasks: queue.Queue[int | None] = queue.Queue()

    def work() -> None:
        for _ in iter(tasks.get, None):
            pass

    assert _wanted(work, lambda: tasks.put(None)).name == "tasks"


def test_barriers_tell_who_is_missing() -> None:
    barrier = threading.Barrier(3)
    found = _wanted(barrier.wait, barrier.abort, lambda frames: waited_for(frames) if barrier.n_waiting else None)
    assert (found.kind, found.count, found.room, found.name) == ("barrier", 1, 3, "wait()")


def test_the_child_that_is_waited_for_is_known() -> None:
    child = subprocess.Popen(["sleep", "30"])
    found = _wanted(child.communicate, child.kill)
    assert (found.kind, found.process, found.timed) == ("child process", child.pid, False)


def _polls(path: Path, ended: threading.Event) -> None:
    while path.exists() and not ended.is_set():
        time.sleep(0.01)


def _opens(path: str, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            return
        except FileExistsError:
            time.sleep(0.01)


def _reads(path: Path, ended: threading.Event) -> None:
    while path.read_text() and not ended.is_set():
        time.sleep(0.01)


def test_a_lock_file_is_found_by_the_loop_that_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "busy"
    path.write_text("999999999\n")
    ended = threading.Event()
    for wait in (lambda: _polls(path, ended), lambda: _opens(str(path), ended)):
        with _thread(wait) as thread:
            found = _seen(thread, awaited_file)
            ended.set()
            thread.join()
            ended.clear()
        assert isinstance(found, LockFile)
        assert (found.path, found.writer, found.writer_lives) == (str(path), 999999999, False)

    with _thread(lambda: _reads(path, ended)) as thread:
        time.sleep(0.1)
        assert awaited_file(_frames(thread)) is None
        ended.set()
        thread.join()


def test_the_holder_of_a_lock_that_is_asked_for_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "data.lock"
    path.touch()
    listing = (
        f"1: FLOCK  ADVISORY  WRITE 4242 00:2f:{path.stat().st_ino} 0 EOF\n2: POSIX  ADVISORY  WRITE 17 00:2f:1 0 EOF\n"
    )
    (tmp_path / "locks").write_text(listing)
    asked = PyThread(ident=1, lock_file=LockFile(path=str(path), age=1.0, by_kernel=True))
    view = with_holders(InsideView(pid=os.getpid(), time=0.0, threads=(asked,)), proc=tmp_path)
    found = view.threads[0].lock_file
    assert found is not None
    assert found.holder == 4242
