"""What the child writes to stderr, heard by the parent on its way: byte for byte, in order, and a terminal stays one.

CUDA's kernels say on stderr which check has failed, and nowhere else. How it is heard depends on what stderr is:

- a file: the child writes there itself, and the parent reads what was appended (`follow.py`);
- a pipe or socket: the child gets a pipe, and a thread of the parent passes everything on;
- a terminal: the same with a pseudo-terminal, which is nobody's controlling terminal: keys, Ctrl-C, Ctrl-Z and job
  control go on between the real one and the child;
- anything else, or nothing: left alone.

Where stdout and stderr are the same pipe or terminal, the child gets one new one for both: two would lose the order in
which the two were written (the clearing of a progress bar, say, could come after the line that needs the room).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator

from torchmedic.contained import report_fault
from torchmedic.supervise.child.pty import StandIn, above

Hear = Callable[[bytes], object]

_CHUNK = 1 << 16
_MOST = 1 << 21  # more than a pipe or terminal holds
_GRACE = 0.25  # seconds in which children of the dead child may still end and be heard
_ATOMIC = select.PIPE_BUF
# A line at a time would wake us at every one: while lines follow each other closely, take some of them together.
_FEW = 2048
_CLOSELY = 0.002
_PAUSE = 0.0005


class Stream:
    """A stderr that is left alone."""

    def __init__(self) -> None:
        self.given: dict[str, int] = {}  # what Popen shall give to the child instead of our own

    def start(self) -> None:
        """The child has been started."""

    def look(self) -> None:
        """Called a few times a second."""

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Around words of our own: they come after what the child has written so far."""
        yield

    def finish(self) -> None:
        """The child has ended: pass on all that it left."""

    def let_go(self) -> None:
        """We are about to end."""


def choose(hear: Hear) -> Stream:
    """How to hear what goes to our stderr, and to nobody's harm."""
    try:
        ours = os.fstat(2)
    except OSError:
        return Stream()  # closed
    mode = ours.st_mode
    try:
        if stat.S_ISREG(mode):
            from torchmedic.supervise.child.stderr_file import Followed

            return Followed(hear)
        if os.isatty(2):
            return Stream() if _another_terminal(ours) else Pumped(hear, terminal=True, both=_same(ours))
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            return Pumped(hear, both=_same(ours))
        if stat.S_ISCHR(mode) and ours.st_rdev == os.stat(os.devnull).st_rdev:
            return Pumped(hear)
    except (OSError, termios.error):
        return Stream()  # no pseudo-terminals here, no descriptors left
    return Stream()


def _same(ours: os.stat_result) -> bool:
    try:
        other = os.fstat(1)
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino, ours.st_rdev) == (other.st_dev, other.st_ino, other.st_rdev)


def _another_terminal(ours: os.stat_result) -> bool:
    """Whether stdout is a terminal too, and perhaps the same under another name (/dev/tty)."""
    return os.isatty(1) and not _same(ours)


class Pumped(Stream):
    """A pipe or pseudo-terminal for the child, and a thread that passes on what comes out of it.

    Our copy of the child's end stays open until the child has ended, so that the stream ends no sooner than that.
    """

    def __init__(self, hear: Hear, *, terminal: bool = False, both: bool = False) -> None:
        super().__init__()
        self._hear = hear
        self._lock = threading.Lock()
        self._over = False  # no more for the thread to do
        self._ended = False  # nobody is left who could write, or nobody who reads
        self._target = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
        self._terminal = StandIn(self._target) if terminal else None
        if self._terminal is not None:
            self._source, self._end = self._terminal.source, self._terminal.end
        else:
            self._source, self._end = map(above, os.pipe())
        os.set_blocking(self._source, False)
        self.given = {"stderr": self._end, **({"stdout": self._end} if both else {})}

    def start(self) -> None:
        threading.Thread(target=self._run, name="torchmedic-stderr", daemon=True).start()

    def look(self) -> None:
        if self._terminal is not None:
            self._terminal.carry_size()
            if self._lock.acquire(blocking=False):  # never wait here for somebody who does not read
                try:
                    self._terminal.carry_modes()
                finally:
                    self._lock.release()

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        with self._lock:
            self._drain()
            yield

    def finish(self) -> None:
        with self._lock:
            self._over = True
            os.close(self._end)
            self._drain()  # all that the child wrote is in there by now
            end = time.monotonic() + _GRACE
            while not self._ended and (left := end - time.monotonic()) > 0:
                if _wait(self._source, select.POLLIN, left):
                    self._pass_on()

    def let_go(self) -> None:
        """Somebody whom the child left behind still writes: without us it could, so leave somebody to pass it on."""
        if self._ended:
            return
        self._ended = self._over = True
        os.set_blocking(self._source, True)
        with contextlib.suppress(OSError):
            left_behind = subprocess.Popen(
                ["cat"], stdin=self._source, stdout=self._target, stderr=subprocess.DEVNULL, start_new_session=True
            )
            left_behind.returncode = 0  # nobody will wait for it

    def _run(self) -> None:
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        last = 0.0
        try:
            while not self._over:
                waiting.poll()
                with self._lock:
                    count = 0 if self._over else self._pass_on()
                before, last = last, time.monotonic()
                if count < _FEW and last - before < _CLOSELY:
                    time.sleep(_PAUSE)
        except Exception as error:
            report_fault("supervise.tee", error)
            self.let_go()  # the child must never wait for a reader that is gone

    def _drain(self) -> None:
        """Pass on what is there now."""
        passed = 0
        while passed < _MOST and (count := self._pass_on()):
            passed += count

    def _pass_on(self) -> int:
        """What is there now, or a good part of it; how many bytes."""
        data = b"" if self._ended else self._read()
        if not data:
            return 0
        if self._terminal is not None and not self._over:
            self._terminal.carry_modes()
        try:
            self._write(data)
        except OSError:
            # Whoever read our stderr is gone. The child shall notice as it would have without us.
            self._ended = self._over = True
            os.close(self._source)
        self._hear(data)
        return len(data)

    def _read(self) -> bytes:
        parts, size = [], 0
        while size < _CHUNK:
            try:
                part = os.read(self._source, _CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EIO:  # how a pseudo-terminal says that it was closed
                    raise
                part = b""
            self._ended = not part
            parts.append(part)
            size += len(part)
            if self._ended or self._terminal is None:  # a terminal gives four kilobytes at most
                break
        return b"".join(parts)

    def _write(self, data: bytes) -> None:
        view, start = memoryview(data), 0
        while start < len(data):
            end = _piece(data, start) if self._terminal is None else len(data)
            try:
                start += os.write(self._target, view[start:end])
            except BlockingIOError:
                _wait(self._target, select.POLLOUT)


def _piece(data: bytes, start: int) -> int:
    """The end of some whole lines that a pipe takes as one, so that no other writer gets into the middle of a line."""
    if len(data) - start <= _ATOMIC:
        return len(data)
    return data.rfind(b"\n", start, start + _ATOMIC) + 1 or start + _ATOMIC


def _wait(descriptor: int, event: int, seconds: float | None = None) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, event)
    return bool(waiting.poll(None if seconds is None else seconds * 1000))
