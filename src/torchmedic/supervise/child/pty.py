"""A pseudo-terminal in place of the real terminal, with the same size and modes. It changes no byte of the output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios

_OUTPUT = 1  # index of the output modes in the result of tcgetattr


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
