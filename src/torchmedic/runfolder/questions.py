"""How the parent asks a process of the run about itself, and where the answer is found.

inside/<pid>.ask     a named pipe: a byte written here is a question
inside/<pid>.heard   there as soon as the question was heard
inside/<pid>.json    the answer, replaced as a whole
inside/<pid>.saved   where the weights were saved to, if that was the question
inside/<pid>.held    who holds its memory, if that was the question
inside/<pid>.busy    there as long as torchmedic itself keeps the process from going on
inside/<pid>.txt     the stacks, written by faulthandler on a signal if nobody answers
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from torchmedic.records.inside import InsideView
from torchmedic.records.memory import HeldMemory
from torchmedic.records.stall import Saved
from torchmedic.runfolder.files import write_atomically

FOLDER = "inside"
LOOK = b"?"
GLANCE = b"p"  # of those who examine another process: any answer from now on will do
SAVE = b"s"
HOLD = b"h"


def question(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.ask"


def answer(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.json"


def heard(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.heard"


def saved(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.saved"


def held(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.held"


def busy(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.busy"


def dump(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.txt"


def signal_number() -> int | None:
    """A signal that nobody else uses, where the system has such."""
    first = getattr(signal, "SIGRTMIN", None)
    return None if first is None else int(first) + 11


@contextlib.contextmanager
def kept_waiting(run: Path, pid: int) -> Iterator[None]:
    """Tell the parent for how long a process does not go on because of us."""
    path = busy(run, pid)
    with contextlib.suppress(OSError):
        path.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def ask(run: Path, pid: int, word: bytes = LOOK) -> bool:
    """Ask a process; whether there is one that listens."""
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
    write_atomically(path, msgspec.json.encode(record))


def read_answer(run: Path, pid: int) -> InsideView | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(answer(run, pid).read_bytes(), type=InsideView)
    return None


def read_saved(run: Path, pid: int) -> Saved | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(saved(run, pid).read_bytes(), type=Saved)
    return None


def write_held(run: Path, pid: int, holders: Sequence[HeldMemory]) -> None:
    write_atomically(held(run, pid), msgspec.json.encode(holders))


def read_held(run: Path, pid: int) -> tuple[HeldMemory, ...]:
    """What held most when a process was last asked, the biggest first."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(held(run, pid).read_bytes(), type=tuple[HeldMemory, ...])
    return ()


def holders_known(run: Path) -> set[int]:
    """The processes that have said what they hold. One that has ended well since has left nothing else."""
    return {int(path.stem) for path in (run / FOLDER).glob("*.held") if path.stem.isdecimal()}


def listeners(run: Path) -> list[int]:
    """The processes that can be asked."""
    return sorted(int(path.stem) for path in (run / FOLDER).glob("*.ask") if path.stem.isdecimal())


def remove(run: Path, *, over: bool) -> None:
    """Clear away what processes that are gone had opened, but not what they said; of all of them if the run is over."""
    for path in (run / FOLDER).glob("*"):
        with contextlib.suppress(OSError):
            gone = over or not os.path.exists(f"/proc/{path.stem}")
            if gone and (path.suffix == ".ask" or not path.stat().st_size):
                path.unlink()


def ask_for_dump(pid: int, listener: int) -> bool:
    """Have faulthandler write the stacks of a process, by a signal to the thread of ours in it and to no other.

    A system call of any other thread would be interrupted by it.
    """
    number = signal_number()
    if number is None:
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).tgkill(pid, listener, number) == 0)
    except (AttributeError, OSError):
        return False
