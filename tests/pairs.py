"""The same command twice, without torchmedic and with it, to be compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
from running import clean_environment


class Ended(msgspec.Struct):
    status: int
    stdout: str
    stderr: str


def plainly(folder: Path, *words: str, flags: tuple[str, ...] = (), stdin: str = "", **environment: str) -> Ended:
    """`python words`, with the status as a shell reports it."""
    return _run(folder, [sys.executable, *flags, *words], stdin, environment)


def watched(folder: Path, *words: str, flags: tuple[str, ...] = (), stdin: str = "", **environment: str) -> Ended:
    """`python -m torchmedic run words`; the run folder is `run`."""
    command = [sys.executable, *flags, "-m", "torchmedic", "run", "--output", "run", *words]
    return _run(folder, command, stdin, environment)


def _run(folder: Path, command: list[str], stdin: str, environment: dict[str, str]) -> Ended:
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean_environment(**environment),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=250,
    )
    return Ended(done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stdout, done.stderr)
