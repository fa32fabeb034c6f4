"""A pseudo-terminal that stands in for the real one: the same size and modes, and no byte is changed on its way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios

_OUTPUT = 1  # where tcgetattr has the output modes


class StandIn:
    """The real terminal and the one that the child writes to.

    The child has the real one as its controlling terminal and on stdin. But a program may ask its stdout for the size,
    or set the terminal up through it, as curses does: both are carried over.
    """

    def __init__(self, real: int) -> None:
        self._real = real
        modes = termios.tcgetattr(real)
        self.source, self.end = map(above, os.openpty())
        modes[_OUTPUT] &= ~termios.OPOST  # the real one does that
        termios.tcsetattr(self.end, termios.TCSANOW, modes)
        self._modes = termios.tcgetattr(self.end)
        self._size = b""
        self.carry_size()

    def carry_size(self) -> None:
        """From the real one. No signal comes of it: the child, which shares our process group, has had the kernel's."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._real, termios.TIOCGWINSZ, b"\0" * 8)
            if size != self._size:
                self._size = size
                fcntl.ioctl(self.end, termios.TIOCSWINSZ, size)

    def carry_modes(self) -> None:
        """To the real one, if the child has changed them, and if it could have changed those of the real one."""
        with contextlib.suppress(OSError, termios.error):
            modes = termios.tcgetattr(self.end)
            if modes == self._modes:
                return
            self._modes = modes
            if os.tcgetpgrp(self._real) == os.getpgrp():
                output = termios.tcgetattr(self._real)[_OUTPUT]
                termios.tcsetattr(self._real, termios.TCSANOW, [modes[0], output, *modes[2:]])


def above(descriptor: int) -> int:
    """The same file under a number that is none of the standard streams, of which some may be closed."""
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return int(moved)
