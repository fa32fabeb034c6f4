"""A process that keeps its failing step alive, so that somebody can try patches on it (`run --hold SECONDS`).

.hold                  exists if failing steps are to be held: the number of seconds
held/<pid>.json        a process that holds its step, and since when it waits
held/<pid>.<n>.patch   a patch to try, a unified diff
held/<pid>.<n>.json    what came of it
held/<pid>.release     made by whoever wants the process to go on
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmedic.records import encode_line
from torchmedic.runfolder import layout, questions, reading
from torchmedic.runfolder.files import write_atomically

_MARK = ".hold"
_FOLDER = "held"
_MAX_PATCH_BYTES = 1 << 20
_POLL_SECONDS = 0.1


class HeldStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that waits for patches until `until`, in seconds since 1970."""

    pid: int
    code: str
    step: int | None = None
    until: float = 0.0


class PatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a patch. `refused` says why it was not tried; else the step was run with it."""

    passed: bool = False
    result: str = ""
    refused: str = ""


def mark(run: Path, seconds: float) -> None:
    layout.mark(run / _MARK, f"{seconds:g}")


def seconds_to_hold(run: Path) -> float:
    """How long a failing step is held; 0 if it is not."""
    with contextlib.suppress(OSError, ValueError):
        return max(0.0, float(reading.read(run / _MARK, 64).decode()))
    return 0.0


# In the process that holds its step


@contextlib.contextmanager
def announced(run: Path, held: HeldStep) -> Iterator[Path]:
    """Tell that a step is held, as long as it is; gives the folder of the patches."""
    folder = layout.new_folder(run / _FOLDER, exist_ok=True)
    path = folder / f"{held.pid}.json"
    write_atomically(path, encode_line(held))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def patches(run: Path, held: HeldStep) -> Iterator[tuple[int, str]]:
    """The patches that come in, with their numbers, until the time is up or the process is released."""
    folder = run / _FOLDER
    number = 0
    while time.time() < held.until and not (folder / f"{held.pid}.release").exists():
        try:
            text = reading.read(folder / f"{held.pid}.{number}.patch", _MAX_PATCH_BYTES).decode(errors="replace")
        except OSError:
            with contextlib.suppress(OSError):
                os.utime(questions.busy(run, held.pid))  # the parent would take a long wait for a hang
            time.sleep(_POLL_SECONDS)
            continue
        yield number, text
        number += 1


def answer(run: Path, held: HeldStep, number: int, result: PatchResult) -> None:
    write_atomically(run / _FOLDER / f"{held.pid}.{number}.json", encode_line(result))


# In the process of whoever tries patches


def held_steps(run: Path) -> list[HeldStep]:
    """The steps of a run that wait for patches now."""
    found = []
    if (run / _FOLDER).is_symlink():
        return []  # a patch would be written where the link leads
    for path in sorted((run / _FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            held = reading.decode(reading.read(path), HeldStep) if path.stem.isdecimal() else None
            if held is not None and held.until > time.time() and os.path.exists(f"/proc/{held.pid}"):
                found.append(held)
    return found


def try_patch(run: Path, held: HeldStep, patch: str, seconds: float) -> PatchResult:
    """Have a patch tried; a result that says so if there is no answer in time."""
    folder = run / _FOLDER
    number = len(list(folder.glob(f"{held.pid}.*.patch")))
    write_atomically(folder / f"{held.pid}.{number}.patch", patch.encode())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return reading.decode(reading.read(folder / f"{held.pid}.{number}.json"), PatchResult)
        if not os.path.exists(f"/proc/{held.pid}"):
            return PatchResult(refused="the process that held the step has ended")
        time.sleep(_POLL_SECONDS)
    return PatchResult(refused=f"no answer within {seconds:.0f} seconds")


def release(run: Path) -> None:
    """Let the processes go on."""
    for held in held_steps(run):
        layout.mark(run / _FOLDER / f"{held.pid}.release")
