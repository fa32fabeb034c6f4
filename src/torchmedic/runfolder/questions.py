"""Questions of the parent to a process of the run, and their answers.

inside/<pid>.ask     a named pipe: each byte is a question
inside/<pid>.heard   exists as soon as the process has heard the question
inside/<pid>.json    the answer, replaced as a whole
inside/<pid>.saved   the path of the saved weights, if that was the question
inside/<pid>.held    the holders of its memory, if that was the question
inside/<pid>.busy    exists while torchmedic itself holds the process up
inside/<pid>.txt     the stacks, written by faulthandler on a signal if the process does not answer
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from torchmedic.records import encode_line
from torchmedic.records.inside import InsideView
from torchmedic.records.memory import HeldMemory
from torchmedic.records.stall import Saved
from torchmedic.runfolder import layout, reading
from torchmedic.runfolder.files import write_atomically

FOLDER = "inside"
LOOK = b"?"
GLANCE = b"p"  # for a process that is not itself examined: any answer from now on will do
SAVE = b"s"
HOLD = b"h"


def _path(suffix: str, run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.{suffix}"


question = functools.partial(_path, "ask")
answer = functools.partial(_path, "json")
heard = functools.partial(_path, "heard")
saved = functools.partial(_path, "saved")
held = functools.partial(_path, "held")
busy = functools.partial(_path, "busy")
dump = functools.partial(_path, "txt")


def signal_number() -> int | None:
    """A signal that no one else uses; None if the system has no such signal."""
    first = getattr(signal, "SIGRTMIN", None)
    return None if first is None else int(first) + 11


@contextlib.contextmanager
def kept_waiting(run: Path, pid: int) -> Iterator[None]:
    """Tell the parent that torchmedic itself holds the process up."""
    path = busy(run, pid)
    with contextlib.suppress(OSError):
        layout.mark(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def ask(run: Path, pid: int, word: bytes = LOOK) -> bool:
    """Ask a process, and return whether it listens."""
    if word not in (GLANCE, HOLD):
        for path in (heard(run, pid), answer(run, pid) if word == LOOK else saved(run, pid)):
            with contextlib.suppress(OSError):
                path.unlink()
    try:
        pipe = os.open(question(run, pid), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(pipe, word)
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def write(run: Path, record: InsideView | Saved) -> None:
    path = answer(run, record.pid) if isinstance(record, InsideView) else saved(run, record.pid)
    write_atomically(path, encode_line(record))


def read_answer(run: Path, pid: int) -> InsideView | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return reading.decode(reading.read(answer(run, pid)), InsideView)
    return None


def read_saved(run: Path, pid: int) -> Saved | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return reading.decode(reading.read(saved(run, pid)), Saved)
    return None


def write_held(run: Path, pid: int, holders: Sequence[HeldMemory]) -> None:
    write_atomically(held(run, pid), encode_line(holders))


def read_held(run: Path, pid: int) -> tuple[HeldMemory, ...]:
    """The largest holders of memory when a process was last asked, largest first."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return reading.decode(reading.read(held(run, pid)), tuple[HeldMemory, ...])
    return ()


def seconds_since_held(run: Path, pid: int) -> float | None:
    """The age of the answer of a process that was asked what it holds."""
    with contextlib.suppress(OSError):
        return time.time() - held(run, pid).stat().st_mtime
    return None


def holders_known(run: Path) -> set[int]:
    """The processes that have answered what they hold, including those that have ended since."""
    return {int(path.stem) for path in (run / FOLDER).glob("*.held") if path.stem.isdecimal()}


def listeners(run: Path) -> list[int]:
    """The processes that can be asked."""
    return sorted(int(path.stem) for path in (run / FOLDER).glob("*.ask") if path.stem.isdecimal())


def remove(run: Path, *, over: bool) -> None:
    """Remove the pipes and empty files of processes that have ended, or of all processes if the run is over."""
    for path in (run / FOLDER).glob("*"):
        with contextlib.suppress(OSError):
            gone = over or not os.path.exists(f"/proc/{path.stem}")
            if gone and (path.suffix == ".ask" or not path.stat().st_size):
                path.unlink()


def ask_for_dump(pid: int, listener: int) -> bool:
    """Make faulthandler write the stacks of a process.

    The signal goes to torchmedic's own thread only, because it would interrupt a system call of any other thread.
    """
    number = signal_number()
    if number is None:
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).tgkill(pid, listener, number) == 0)
    except (AttributeError, OSError):
        return False
