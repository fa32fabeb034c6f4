"""Signals on their way to the child: each one once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable

FORWARDED = frozenset(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_SI_KERNEL = 0x80
_GRACE = 5.0  # seconds between the second Ctrl-C and the end


class Forwarder:
    """Waits for signals and for the child; all of ours are blocked and taken one by one."""

    def __init__(self, on_tick: Callable[[], None], *, tick: float = 0.25) -> None:
        self._on_tick = on_tick
        self._tick = tick
        self._interrupts = 0
        self._deadline: float | None = None
        self.blocked: set[signal.Signals] = set()
        if hasattr(signal, "sigtimedwait"):
            self.blocked = {*FORWARDED, signal.SIGCHLD}
        self._inherited = signal.pthread_sigmask(signal.SIG_BLOCK, self.blocked)

    def release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._inherited)

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """Pass signals on until the child has ended; its wait status as Popen gives it."""
        if not self.blocked:
            return self._wait_by_handlers(child)
        shares_terminal = os.getpgid(child.pid) == os.getpgrp()
        while (status := child.poll()) is None:
            received = signal.sigtimedwait(self.blocked, self._tick)
            if received is not None and received.si_signo in FORWARDED:
                # What a terminal sends comes from the kernel and has reached the child, which shares our group.
                from_terminal = received.si_code == _SI_KERNEL and shares_terminal
                self._pass_on(child, signal.Signals(received.si_signo), already_there=from_terminal)
            if self._deadline is not None and time.monotonic() > self._deadline:
                child.kill()
            self._on_tick()
        return status

    def _wait_by_handlers(self, child: subprocess.Popen[bytes]) -> int:
        """For systems without sigtimedwait (macOS): the sender is not known there, so the terminal's are told by it."""
        shared = os.getpgid(child.pid) == os.getpgrp()

        def handler(number: int, _: object) -> None:
            self._pass_on(child, signal.Signals(number), already_there=shared and number == signal.SIGINT)

        for number in FORWARDED:
            signal.signal(number, handler)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(self._tick)
            self._on_tick()

    def _pass_on(self, child: subprocess.Popen[bytes], number: signal.Signals, *, already_there: bool) -> None:
        if not already_there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 2:
                # The second Ctrl-C ends it, also where Python cannot act on it (C code, a held GIL).
                self._deadline = time.monotonic() + _GRACE
