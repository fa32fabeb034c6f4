"""A script's output as bytes, through a pipe, a file or a terminal, without torchmedic and with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable
from pathlib import Path

import msgspec
from running import clean_environment


class Written(msgspec.Struct):
    status: int
    stdout: bytes
    stderr: bytes


def plain(*words: str) -> list[str]:
    return [sys.executable, *words]


def watched(*words: str) -> list[str]:
    return [sys.executable, "-m", "torchmedic", "run", "--output", "run", *words]


def through_pipes(folder: Path, command: list[str], *, both: bool = False) -> Written:
    """stdout and stderr as two pipes, or as one."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.PIPE,
        timeout=250,
    )
    return Written(_shell(done.returncode), done.stdout, done.stderr or b"")


def into_files(folder: Path, command: list[str], *, both: bool = False, flags: int = 0) -> Written:
    """stdout and stderr as two files, or as one."""
    names = ["out", "out" if both else "err"]
    first = os.open(folder / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
    second = first if both else os.open(folder / "err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=first, stderr=second, timeout=250
    )
    for descriptor in {first, second}:
        os.close(descriptor)
    out, err = ((folder / name).read_bytes() for name in names)
    return Written(_shell(done.returncode), out, b"" if both else err)


def on_terminal(folder: Path, command: list[str], *, both: bool = True, raw: bool = True) -> Written:
    """All on a terminal of its own, which changes no byte if it is `raw`; stdout is a pipe if not `both`."""
    terminal = Terminal(folder, command, out_pipe=not both, raw=raw)
    terminal.read_to_end()
    return Written(terminal.status, terminal.piped, terminal.output)


class Terminal:
    """A command on a terminal of its own, 100 columns wide."""

    def __init__(self, folder: Path, command: list[str], *, out_pipe: bool = False, raw: bool = True) -> None:
        self.output = self.piped = b""
        self.status = -1
        pipe = os.pipe() if out_pipe else None
        environment = clean_environment()  # before the folder changes: a path of modules may be relative to it
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
            if raw:
                tty.setraw(0)
            if pipe is not None:
                os.dup2(pipe[1], 1)
            os.chdir(folder)
            os.execve(command[0], command, environment)
        self._pipe = pipe[0] if pipe is not None else None
        if pipe is not None:
            os.close(pipe[1])

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def read_until(self, enough: Callable[[bytes], bool]) -> None:
        end = time.monotonic() + 60
        while not enough(self.output) and time.monotonic() < end and self._read():
            pass
        assert enough(self.output), self.output

    def read_to_end(self) -> None:
        while self._read():
            pass
        self.status = _shell(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))
        os.close(self.fd)
        if self._pipe is not None:
            with open(self._pipe, "rb") as file:
                self.piped = file.read()

    def _read(self) -> bool:
        with contextlib.suppress(OSError):  # how it says that the other side is closed
            if select.select([self.fd], [], [], 60)[0]:
                data = os.read(self.fd, 1 << 16)
                self.output += data
                return bool(data)
        return False


def _shell(status: int) -> int:
    return status if status >= 0 else 128 - status
