"""Silence about the deaths of DataLoader workers, for as long as something else is told."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Have no word of dying workers: torch's handler of SIGCHLD raises wherever the main thread is, in our code too."""
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGCHLD)
    if not callable(before):
        yield
        return
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
