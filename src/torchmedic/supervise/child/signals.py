"""Forwards signals to the child, each exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

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
_SECOND_INTERRUPT_SECONDS = 5.0  # a second Ctrl-C within this time ends the run
_KILL_DELAY_SECONDS = 5.0  # after the second Ctrl-C


class Forwarder:
    """Waits for signals and for the child. The parent's signals are blocked and taken one by one."""

    def __init__(self, *, tick: float = 0.25) -> None:
        self._tick = tick
        self.speaking: Callable[[], AbstractContextManager[None]] = (
            contextlib.nullcontext
        )  # entered around our messages
        self._interrupted = -_SECOND_INTERRUPT_SECONDS
        self._deadline: float | None = None
        self.killed = False  # by torchmedic, so the death needs no explanation
        self.blocked: set[signal.Signals | int] = set()
        if hasattr(signal, "sigtimedwait"):
            # SIGWINCH ends the wait to copy the terminal size; the child gets its own.
            self.blocked = {*FORWARDED, signal.SIGCHLD, signal.SIGWINCH}
        self.inherited = signal.pthread_sigmask(signal.SIG_BLOCK, self.blocked)
        # If SIGCHLD is ignored, which is inherited, the kernel keeps no wait status.
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def hold_on(self) -> None:
        """Block a launcher's SIGTERM while the end of the child is explained. Ctrl-C still ends torchmedic."""
        if self.blocked:
            signal.pthread_sigmask(signal.SIG_SETMASK, {*self.inherited, *_LAUNCHER_SIGNALS})

    def release(self) -> None:
        """Restore the signal mask, and drop pending signals that were meant for the child."""
        while self.blocked and signal.sigtimedwait(_LAUNCHER_SIGNALS - self.inherited, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self.inherited)

    def wait(self, child: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> int:
        """Forward signals until the child has ended, and return its wait status as Popen gives it."""
        if not self.blocked:
            return self._wait_by_handlers(child, on_tick)
        shares_terminal = _group_of(child) == os.getpgrp()
        while (status := child.poll()) is None:
            received = signal.sigtimedwait(self.blocked, self._tick)
            if received is not None and received.si_signo in FORWARDED:
                # A terminal's signal comes from the kernel and has also reached the child, which shares our group.
                # A timer's signal (`alarm`) comes from the kernel too, but has reached only us.
                from_kernel = received.si_code == _SI_KERNEL and shares_terminal
                from_terminal = from_kernel and received.si_signo in _TERMINAL_SIGNALS
                self._pass_on(child, received.si_signo, already_there=from_terminal)
            self._end_if_due(child)
            on_tick()
        return status

    def _wait_by_handlers(self, child: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> int:
        """Wait on systems without sigtimedwait (macOS): the sender is unknown, so SIGINT counts as the terminal's."""
        shared = _group_of(child) == os.getpgrp()

        def handler(number: int, _: object) -> None:
            self._pass_on(child, number, already_there=shared and number == signal.SIGINT)

        for number in FORWARDED:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, handler)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(self._tick)
            self._end_if_due(child)
            on_tick()

    def _pass_on(self, child: subprocess.Popen[bytes], number: int, *, already_there: bool) -> None:
        if not already_there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._interrupted < _SECOND_INTERRUPT_SECONDS and self._deadline is None:
                # The second Ctrl-C ends the run even if Python cannot act on it (C code, a held GIL).
                self._deadline = now + _KILL_DELAY_SECONDS
            self._interrupted = now

    def _end_if_due(self, child: subprocess.Popen[bytes]) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            self.killed = True
            with self.speaking():
                sys.stderr.write("torchmedic: still running after the second Ctrl-C; killed\n")
                sys.stderr.flush()
            with contextlib.suppress(ProcessLookupError):
                if _group_of(child) == child.pid:
                    os.killpg(child.pid, signal.SIGKILL)
                else:
                    child.kill()


def _group_of(child: subprocess.Popen[bytes]) -> int:
    try:
        return os.getpgid(child.pid)
    except ProcessLookupError:
        return child.pid


def shell_status(status: int) -> int:
    """A wait status as a shell reports it."""
    return status if status >= 0 else 128 - status
