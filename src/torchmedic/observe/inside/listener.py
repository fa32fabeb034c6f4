"""A thread that waits for the parent to ask, so that a process that makes no progress can say why.

It sleeps in a read of a named pipe: no lock, no GIL, no cost. It is no `threading.Thread`, so that whoever counts
threads does not count it, and it is away while the process forks, as Python warns of a fork beside other threads.
If the GIL is held for good it cannot answer; then a signal makes faulthandler write the stacks, which needs no GIL.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path
from posix import read as wait_for_byte  # some libraries replace `os.read`
from typing import Any

import msgspec

from torchmedic.contained import report_fault
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.heap.walk import Held
from torchmedic.observe.inside.other_threads import OTHERS
from torchmedic.observe.inside.thread_log import ThreadLog
from torchmedic.records.memory import HeldMemory
from torchmedic.records.process import LISTENER
from torchmedic.runfolder import layout, questions
from torchmedic.runfolder.descriptors import open_to_the_end, out_of_the_way

_QUIT = b"q"
_MAX_WAIT_SECONDS = 1.0  # for the listening thread to end
_PR_SET_NAME = 15
_MAX_QUESTIONS = 64  # that one answer is enough for


class Listener:
    """Answers the questions of the parent; one per process."""

    def __init__(self, agent: ProcessContext, locate: Callable[[list[tuple[Held, int]]], list[HeldMemory]]) -> None:
        """`locate` finds the lines that fill the holders of memory."""
        self._agent = agent
        self._locate = locate
        self._born: int | None = None  # how many threads the parent had when this process was forked
        self._pipe = -1
        self._file: Any = None
        self._ended = _thread.allocate_lock()
        self._listens = False
        self._threads_at_fork: int | None = None
        self.threads = ThreadLog()

    @property
    def forked(self) -> bool:
        return self._born is not None

    def open(self) -> None:
        """Begin to listen. A second call after a fork begins anew, in the child's own name."""
        folder = self._agent.run / questions.FOLDER
        layout.new_folder(folder, exist_ok=True)
        path = questions.question(self._agent.run, os.getpid())
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of an earlier process with this number
        os.mkfifo(path, 0o600)
        path.chmod(0o600)
        # For reading and writing, so that there is always a writer and a read waits.
        self._pipe = out_of_the_way(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        self._dump_on_signal(questions.dump(self._agent.run, os.getpid()))
        self._begin()

    def _dump_on_signal(self, path: Path) -> None:
        number = questions.signal_number()
        if number is None or signal.getsignal(number) not in (signal.SIG_DFL, None):
            return  # the user's
        self._file = open_to_the_end(path)
        faulthandler.register(number, file=self._file, all_threads=True, chain=False)

    def _begin(self) -> None:
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self._listens = True
        _thread.start_new_thread(self._listen, (self._pipe, self._ended))

    def close(self) -> None:
        """Remove the files of a process that ends well: a run may have thousands of workers, one after the other."""
        for path in (questions.question, questions.dump, questions.heard):
            with contextlib.suppress(OSError):
                path(self._agent.run, os.getpid()).unlink()

    def before_fork(self) -> None:
        if self._listens:
            self._listens = False
            os.write(self._pipe, _QUIT)
            self._ended.acquire(timeout=_MAX_WAIT_SECONDS)
        with contextlib.suppress(OSError):
            self._threads_at_fork = len(os.listdir("/proc/self/task"))

    def after_fork_in_parent(self) -> None:
        if self._pipe >= 0 and not self._listens:
            self._begin()

    def after_fork_in_child(self) -> None:
        self._born = self._threads_at_fork or 1
        self._listens = False
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
            self.open()

    def _listen(self, pipe: int, ended: Any) -> None:
        # Signals are the main thread's, but for the one that is sent to this thread and to no other.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {questions.signal_number()})
        _name_thread()
        try:
            while True:
                words = wait_for_byte(pipe, _MAX_QUESTIONS)
                if _QUIT in words or not words:
                    os.write(pipe, words.replace(_QUIT, b""))  # whoever listens next answers the others
                    return
                try:
                    self._answer(words)
                finally:
                    OTHERS.give_back()
        except OSError:
            return
        except Exception as error:
            report_fault("observe.inside", error)
        finally:
            ended.release()

    def _answer(self, words: bytes) -> None:
        run = self._agent.run
        layout.mark(questions.heard(run, os.getpid()))  # so the GIL was to be had
        from torchmedic.observe.inside import checkpoint, device, holders, view

        if questions.HOLD in words:
            holders.tell(self._agent, self._locate)
        if questions.SAVE in words:
            questions.write(run, checkpoint.saved(self._agent))
        if questions.LOOK not in words and questions.GLANCE not in words:
            return
        self._agent.publish_collectives()
        seen = view.looked_at(self._agent, self._born, self.threads.ended())
        if not device.in_use():
            questions.write(run, seen)
            self._agent.publish_course()  # the process may be about to be killed
            return
        # A driver that hangs may never answer: what is known by then is told first.
        questions.write(run, msgspec.structs.replace(seen, partial=True))
        self._agent.publish_course()
        questions.write(run, msgspec.structs.replace(seen, **device.state(self._agent)))


def _name_thread() -> None:
    """Let the kernel call this thread ours, so that it can be told from the user's."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, LISTENER.encode(), 0, 0, 0)
