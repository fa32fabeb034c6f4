"""Copies the child's stderr to the parent, unchanged and in order. A terminal stays a terminal for the child.

CUDA kernels print failed checks to stderr and nowhere else. How the parent reads along depends on what stderr is:

- a file: the child writes to it directly, and the parent reads what was appended (`stderr_file.py`);
- a pipe or socket: the child gets a pipe, and a thread of the parent forwards everything;
- a terminal: the child gets a pseudo-terminal, and a thread forwards everything. The real terminal stays the child's
  controlling terminal, so keys, Ctrl-C, Ctrl-Z and job control work as usual;
- anything else, or a closed stderr: left alone.

Where stdout and stderr are the same pipe or terminal, the child gets one new stream for both. Two streams would lose
the order of the output: the clearing of a progress bar could come after the line that it makes space for.
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
from collections.abc import Iterator

from torchmedic.contained import report_fault
from torchmedic.supervise.child.stderr_file import Hear, StderrFile, Stream

_CHUNK_BYTES = 1 << 16
_MAX_DRAIN_BYTES = 1 << 21  # more than a pipe or terminal holds
_GRACE_SECONDS = 0.25  # children of the dead child may still write in this time
_ATOMIC_BYTES = select.PIPE_BUF
# Waking up for every line is expensive: while small writes follow each other closely, several are taken together.
_SMALL_BYTES = 2048
_CLOSE_SECONDS = 0.002
_PAUSE_SECONDS = 0.0005
_OUTPUT = 1  # index of the output modes in the result of tcgetattr


def choose(hear: Hear) -> Stream:
    """Choose how to read along with what the child writes to our stderr."""
    try:
        ours = os.fstat(2)
    except OSError:
        return Stream()  # closed
    mode = ours.st_mode
    try:
        if stat.S_ISREG(mode):
            return StderrFile(hear)
        if os.isatty(2):
            return Stream() if _another_terminal(ours) else StderrPump(hear, terminal=True, both=_same(ours))
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            return StderrPump(hear, both=_same(ours))
        if stat.S_ISCHR(mode) and ours.st_rdev == os.stat(os.devnull).st_rdev:
            return StderrPump(hear)
    except (OSError, termios.error):
        return Stream()  # no pseudo-terminals, or no free descriptors
    return Stream()


def _same(ours: os.stat_result) -> bool:
    try:
        other = os.fstat(1)
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino, ours.st_rdev) == (other.st_dev, other.st_ino, other.st_rdev)


def _another_terminal(ours: os.stat_result) -> bool:
    """Whether stdout is a terminal too, possibly the same one under another name (/dev/tty)."""
    return os.isatty(1) and not _same(ours)


class StderrPump(Stream):
    """A pipe or pseudo-terminal for the child, and a thread that forwards its output.

    The parent keeps the child's end open until the child has ended, so that the stream does not end earlier.
    """

    def __init__(self, hear: Hear, *, terminal: bool = False, both: bool = False) -> None:
        super().__init__()
        self._hear = hear
        self._lock = threading.Lock()
        self._over = False  # the thread is to stop
        self._ended = False  # no writer is left, or no reader
        self._target = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
        self._terminal = PseudoTerminal(self._target) if terminal else None
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
            if self._lock.acquire(blocking=False):  # never wait here for a slow reader
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
            self._drain()  # includes all that the child wrote
            end = time.monotonic() + _GRACE_SECONDS
            while not self._ended and (left := end - time.monotonic()) > 0:
                if _wait(self._source, select.POLLIN, left):
                    self._pass_on()

    def let_go(self) -> None:
        """Leave a `cat` behind if a child of the child still writes, as it could without torchmedic."""
        if self._ended:
            return
        self._ended = self._over = True
        os.set_blocking(self._source, True)
        with contextlib.suppress(OSError):
            left_behind = subprocess.Popen(
                ["cat"], stdin=self._source, stdout=self._target, stderr=subprocess.DEVNULL, start_new_session=True
            )
            left_behind.returncode = 0  # so that Popen does not complain about an unfinished child

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
                if count < _SMALL_BYTES and last - before < _CLOSE_SECONDS:
                    time.sleep(_PAUSE_SECONDS)
        except Exception as error:
            report_fault("supervise.tee", error)
            self.let_go()  # the child must never block on a stopped reader

    def _drain(self) -> None:
        """Forward everything that can be read now."""
        passed = 0
        while passed < _MAX_DRAIN_BYTES and (count := self._pass_on()):
            passed += count

    def _pass_on(self) -> int:
        """Forward up to one chunk, and return the number of bytes."""
        data = b"" if self._ended else self._read()
        if not data:
            return 0
        if self._terminal is not None and not self._over:
            self._terminal.carry_modes()
        try:
            self._write(data)
        except OSError:
            # The reader of our stderr is gone. The child must notice, as it would without torchmedic.
            self._ended = self._over = True
            os.close(self._source)
        self._hear(data)
        return len(data)

    def _read(self) -> bytes:
        parts, size = [], 0
        while size < _CHUNK_BYTES:
            try:
                part = os.read(self._source, _CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EIO:  # a closed pseudo-terminal
                    raise
                part = b""
            self._ended = not part
            parts.append(part)
            size += len(part)
            if self._ended or self._terminal is None:  # a terminal returns at most four kilobytes
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
    """The end of a piece of whole lines that is written atomically, so that no other writer splits a line."""
    if len(data) - start <= _ATOMIC_BYTES:
        return len(data)
    return data.rfind(b"\n", start, start + _ATOMIC_BYTES) + 1 or start + _ATOMIC_BYTES


def _wait(descriptor: int, event: int, seconds: float | None = None) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, event)
    return bool(waiting.poll(None if seconds is None else seconds * 1000))


class PseudoTerminal:
    """The real terminal, and the pseudo-terminal that the child writes to.

    The child has the real terminal as its controlling terminal and on stdin. But a program may read the size from its
    stdout, or set modes through it, as curses does. So the size is copied to the pseudo-terminal and the modes back.
    """

    def __init__(self, real: int) -> None:
        self._real = real
        modes = termios.tcgetattr(real)
        self.source, self.end = map(above, os.openpty())
        modes[_OUTPUT] &= ~termios.OPOST  # the real terminal does the output processing
        termios.tcsetattr(self.end, termios.TCSANOW, modes)
        self._modes = termios.tcgetattr(self.end)
        self._size = b""
        self.carry_size()

    def carry_size(self) -> None:
        """Copy the size of the real terminal. This sends no SIGWINCH: the kernel has sent it to our process group."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._real, termios.TIOCGWINSZ, b"\0" * 8)
            if size != self._size:
                self._size = size
                fcntl.ioctl(self.end, termios.TIOCSWINSZ, size)

    def carry_modes(self) -> None:
        """Copy modes that the child has changed to the real terminal, if the child may change that terminal."""
        with contextlib.suppress(OSError, termios.error):
            modes = termios.tcgetattr(self.end)
            if modes == self._modes:
                return
            self._modes = modes
            if os.tcgetpgrp(self._real) == os.getpgrp():
                output = termios.tcgetattr(self._real)[_OUTPUT]
                termios.tcsetattr(self._real, termios.TCSANOW, [modes[0], output, *modes[2:]])


def above(descriptor: int) -> int:
    """Move a descriptor to a number above the standard streams, some of which may be closed."""
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return int(moved)
