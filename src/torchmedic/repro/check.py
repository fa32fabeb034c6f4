"""Makes the script of a recipe in a separate process, and runs it once to check it. Imports no torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

from torchmedic import _isolated as isolated
from torchmedic.errors import TorchmedicError, UnreadableRun

_MAX_SECONDS = 300.0


class Made(msgspec.Struct, frozen=True):
    """A script that was written. `before` and `after` are the shapes of its inputs, as recorded and as written."""

    lines: int
    values: str | None
    before: list[list[int]]
    after: list[list[int]]


class Checked(msgspec.Struct, frozen=True):
    """The result of one run of a script."""

    reproduced: bool
    said: str


def make(recipe: Path, output: Path, *, shrink: bool = True) -> Made | None:
    """Write the script of a recipe; None if the process that writes it crashed or took too long.

    Raises:
        UnreadableRun: The recipe or its values are damaged, or the script cannot be written.
    """
    paths = (os.path.abspath(recipe), os.path.abspath(output))
    done = _run(isolated.module_command("torchmedic.repro.worker", *paths, *([] if shrink else ["--as-it-is"])))
    if done is None:
        return None
    if done.returncode == 2:
        raise UnreadableRun((done.stderr.strip().splitlines() or ["the script could not be made"])[-1])
    try:
        return msgspec.json.decode(done.stdout.encode(), type=Made)
    except msgspec.DecodeError:
        return None


def check(script: Path) -> Checked:
    """Run a script, without the files beside it."""
    done = _run(isolated.script_command(os.path.abspath(script)))
    if done is None:
        return Checked(False, f"it did not end within {_MAX_SECONDS:.0f} s")
    if done.returncode == 0:
        return Checked(True, (done.stdout.strip().splitlines() or [""])[-1])
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return Checked(False, said[-1] if said else f"exit status {done.returncode}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command,
            check=False,
            cwd=isolated.folder(),
            env=isolated.environment(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAX_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        raise TorchmedicError(f"cannot start {command[0]}: {error.strerror}") from None
