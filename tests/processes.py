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
from typing import Any

import pytest

from torchmedic.process_records import ProcessView
from torchmedic.supervise.proc import process, tree, waits

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
    for _ in range(500):
        view = process.read(pid)
        if view is not None:
            (view,) = waits.with_waits([view])
            if ready(view):
                return view
        time.sleep(0.02)
    pytest.fail(f"never seen so: {view}")


def child_of(pid: int, ready: Callable[[ProcessView], object] = lambda view: True) -> ProcessView:
    """The first child of a process, as soon as it looks as it should."""
    for _ in range(500):
        if len(numbers := tree.pids(pid)) > 1:
            return seen(numbers[1], ready)
        time.sleep(0.02)
    pytest.fail("it has no child")
