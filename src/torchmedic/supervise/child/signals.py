"""Forwards signals to the child, each exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable

# Not forwarded: faults of the parent, stops by the terminal, and signals that are ignored by default.
_NOT_FORWARDED = frozenset(
    getattr(signal, name)
    for name in (
        "SIGKILL SIGSTOP SIGSEGV SIGBUS SIGFPE SIGILL SIGABRT SIGTRAP SIGSYS SIGPIPE "
        "SIGTSTP SIGTTIN SIGTTOU SIGCONT SIGCHLD SIGWINCH SIGURG"
    ).split()
    if hasattr(signal, name)
)
FORWARDED = frozenset(signal.valid_signals() - _NOT_FORWARDED)

_LAUNCHER_SIGNALS = frozenset({signal.SIGTERM})  # sent by a launcher to the remaining ranks

_TERMINAL_SIGNALS = frozenset({signal.SIGINT, signal.SIGHUP, *([signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else [])})

_SI_KERNEL = 0x80


class Forwarder:
    """Waits for signals and for the child. The parent's signals are blocked and taken one by one."""

    def __init__(self) -> None:
        self.blocked: set[signal.Signals | int] = set()
        self._passed_on: set[int] = set()
        if hasattr(signal, "sigtimedwait"):
            # SIGWINCH ends the wait to copy the terminal size; the child gets its own.
            self.blocked = {*FORWARDED, signal.SIGCHLD, signal.SIGWINCH}
        self.inherited = signal.pthread_sigmask(signal.SIG_BLOCK, self.blocked)
        # If SIGCHLD is ignored, which is inherited, the kernel keeps no wait status.
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def has_received(self, *numbers: int) -> bool:
        """Whether the parent was sent one of these signals, as by a launcher, and not the child alone."""
        return not (self._passed_on | signal.sigpending()).isdisjoint(numbers)

    def hold_on(self) -> None:
        """Block a launcher's SIGTERM while the end of the child is explained. Ctrl-C still ends torchmedic."""
        if self.blocked:
            signal.pthread_sigmask(signal.SIG_SETMASK, {*self.inherited, *_LAUNCHER_SIGNALS})

    def release(self) -> None:
        """Restore the signal mask, and drop pending signals that were meant for the child."""
        while self.blocked and signal.sigtimedwait(_LAUNCHER_SIGNALS - self.inherited, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self.inherited)

    def wait(self, child: subprocess.Popen[bytes], on_tick: Callable[[], float]) -> int:
        """Forward signals until the child has ended, and return its wait status as Popen gives it.

        `on_tick` returns the seconds to wait until it wants to be called again. The end of the child does not wait.
        """
        if not self.blocked:
            return self._wait_by_handlers(child, on_tick)
        shares_terminal = _group_of(child) == os.getpgrp()
        pause = 0.0
        while (status := child.poll()) is None:
            received = signal.sigtimedwait(self.blocked, pause)
            if received is not None and received.si_signo in FORWARDED:
                # A terminal's signal comes from the kernel and has also reached the child, which shares our group.
                # A timer's signal (`alarm`) comes from the kernel too, but has reached only us.
                from_kernel = received.si_code == _SI_KERNEL and shares_terminal
                from_terminal = from_kernel and received.si_signo in _TERMINAL_SIGNALS
                self._passed_on.add(received.si_signo)
                _pass_on(child, received.si_signo, already_there=from_terminal)
            pause = on_tick()
        return status

    def _wait_by_handlers(self, child: subprocess.Popen[bytes], on_tick: Callable[[], float]) -> int:
        """Wait on systems without sigtimedwait (macOS): the sender is unknown, so SIGINT counts as the terminal's."""
        shared = _group_of(child) == os.getpgrp()

        def handler(number: int, _: object) -> None:
            self._passed_on.add(number)
            _pass_on(child, number, already_there=shared and number == signal.SIGINT)

        for number in FORWARDED:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, handler)
        pause = 0.0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(pause)
            pause = on_tick()


def _pass_on(child: subprocess.Popen[bytes], number: int, *, already_there: bool) -> None:
    """Send a signal to the child. What the child does with one or several Ctrl-C is the child's own decision."""
    if not already_there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


def _group_of(child: subprocess.Popen[bytes]) -> int:
    try:
        return os.getpgid(child.pid)
    except ProcessLookupError:
        return child.pid


def shell_status(status: int) -> int:
    """A wait status as a shell reports it."""
    return status if status >= 0 else 128 - status
