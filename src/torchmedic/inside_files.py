"""How the parent asks a process of the run about itself, and where the answer is found.

inside/<pid>.ask     a named pipe: a byte written here is a question
inside/<pid>.json    the answer, replaced as a whole
inside/<pid>.saved   where the weights were saved to, if that was the question
inside/<pid>.txt     the stacks, written by faulthandler on a signal if nobody answers
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec

from torchmedic.rundir import write_atomically
from torchmedic.stall_records import InsideView, Saved

FOLDER = "inside"
LOOK = b"?"
SAVE = b"s"


def question(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.ask"


def answer(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.json"


def saved(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.saved"


def dump(run: Path, pid: int) -> Path:
    return run / FOLDER / f"{pid}.txt"


def signal_number() -> int | None:
    """A signal that nobody else uses, where the system has such."""
    first = getattr(signal, "SIGRTMIN", None)
    return None if first is None else int(first) + 11


def ask(run: Path, pid: int, word: bytes = LOOK) -> bool:
    """Ask a process; whether there is one that listens."""
    path = answer(run, pid) if word == LOOK else saved(run, pid)
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


def listeners(run: Path) -> list[int]:
    """The processes that can be asked."""
    return sorted(int(path.stem) for path in (run / FOLDER).glob("*.ask") if path.stem.isdecimal())


def remove(run: Path) -> None:
    """Clear away what processes that are gone had opened, but not what they said."""
    for path in (run / FOLDER).glob("*"):
        with contextlib.suppress(OSError):
            gone = not os.path.exists(f"/proc/{path.stem}")
            if gone and (path.suffix == ".ask" or not path.stat().st_size):
                path.unlink()
