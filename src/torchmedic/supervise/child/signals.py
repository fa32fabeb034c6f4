"""Signals on their way to the child: each one once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

# Left alone: faults of our own, the stops of a terminal, and what a process ignores unless it asks for it.
_OURS = frozenset(
    getattr(signal, name)
    for name in (
        "SIGKILL SIGSTOP SIGSEGV SIGBUS SIGFPE SIGILL SIGABRT SIGTRAP SIGSYS SIGPIPE "
        "SIGTSTP SIGTTIN SIGTTOU SIGCONT SIGCHLD SIGWINCH SIGURG"
    ).split()
    if hasattr(signal, name)
)
FORWARDED = frozenset(signal.valid_signals() - _OURS)

_LAUNCHERS = frozenset({signal.SIGTERM})  # what a launcher sends to the ranks that are left

_TERMINALS = frozenset({signal.SIGINT, signal.SIGHUP, *([signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else [])})

_SI_KERNEL = 0x80
_DOUBLE = 5.0  # seconds within which a second Ctrl-C is meant as "end it"
_GRACE = 5.0  # seconds between that and the end


class Forwarder:
    """Waits for signals and for the child; all of ours are blocked and taken one by one."""

    def __init__(self, *, tick: float = 0.25) -> None:
        self._tick = tick
        self.speaking: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around words of our own
        self._interrupted = -_DOUBLE
        self._deadline: float | None = None
        self.killed = False  # by us: no riddle to solve
        self.blocked: set[signal.Signals | int] = set()
        if hasattr(signal, "sigtimedwait"):
            # The last for a look at the size of the terminal; the child gets it as we do.
            self.blocked = {*FORWARDED, signal.SIGCHLD, signal.SIGWINCH}
        self.inherited = signal.pthread_sigmask(signal.SIG_BLOCK, self.blocked)
        # Whoever started us may have ignored the end of children, and the kernel would then keep no wait status.
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def hold_on(self) -> None:
        """The child has ended, and what it left is still to be explained: a launcher that ends us must wait for that.

        Ctrl-C need not: whoever is in a hurry is let go.
        """
        if self.blocked:
            signal.pthread_sigmask(signal.SIG_SETMASK, {*self.inherited, *_LAUNCHERS})

    def release(self) -> None:
        """Take signals as ever. Those that were for the child, which has ended by itself, are over with it."""
        while self.blocked and signal.sigtimedwait(_LAUNCHERS - self.inherited, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self.inherited)

    def wait(self, child: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> int:
        """Pass signals on until the child has ended; its wait status as Popen gives it."""
        if not self.blocked:
            return self._wait_by_handlers(child, on_tick)
        shares_terminal = _group_of(child) == os.getpgrp()
        while (status := child.poll()) is None:
            received = signal.sigtimedwait(self.blocked, self._tick)
            if received is not None and received.si_signo in FORWARDED:
                # What a terminal sends comes from the kernel and has reached the child, which shares our group.
                # A timer's do as well, of an `alarm` that was set before us: that one has reached nobody else.
                from_terminal = received.si_code == _SI_KERNEL and received.si_signo in _TERMINALS and shares_terminal
                self._pass_on(child, received.si_signo, already_there=from_terminal)
            self._end_if_due(child)
            on_tick()
        return status

    def _wait_by_handlers(self, child: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> int:
        """For systems without sigtimedwait (macOS): the sender is not known there, so the terminal's are told by it."""
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
            if now - self._interrupted < _DOUBLE and self._deadline is None:
                # The second Ctrl-C ends it, also where Python cannot act on it (C code, a held GIL).
                self._deadline = now + _GRACE
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
