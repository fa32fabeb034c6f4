"""Small real processes that wait for something, for tests of what can be seen of them from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from torchmedic.records.process import ProcessView
from torchmedic.supervise.proc import process, tree, waits

PATIENCE = 60.0  # seconds

Found = TypeVar("Found")

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")


@contextlib.contextmanager
def child(source: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A Python process without site-packages, killed with its children in the end."""
    options.setdefault("stdin", subprocess.DEVNULL)
    started = subprocess.Popen([sys.executable, "-S", "-c", textwrap.dedent(source)], start_new_session=True, **options)
    try:
        yield started
    finally:
        with contextlib.suppress(OSError):
            os.killpg(started.pid, signal.SIGKILL)
        started.kill()
        started.wait()
        for stream in (started.stdin, started.stdout, started.stderr):
            if stream is not None:
                stream.close()


def seen(pid: int, ready: Callable[[ProcessView], object]) -> ProcessView:
    """A process with its waits, as soon as it looks as it should."""

    def look() -> ProcessView | None:
        view = process.read(pid)
        if view is None:
            return None
        (view,) = waits.with_waits([view])
        return view if ready(view) else None

    return awaited(look)


def child_of(pid: int, ready: Callable[[ProcessView], object] = lambda view: True) -> ProcessView:
    """The first child of a process, as soon as it looks as it should."""
    return seen(awaited(lambda: tree.pids(pid)[1:])[0], ready)


def awaited(look: Callable[[], Found | None], patience: float = PATIENCE) -> Found:
    """What a look finds, as soon as it finds something: any process may be late, on a machine that is taken."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.02)
    pytest.fail("it never came to that")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, at last; its parent may not have asked how."""
    view = process.read(pid)
    return view is None or view.state in "ZX"
