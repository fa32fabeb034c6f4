"""Questions that may never be answered (a driver, a file system, an import), asked in a process with a time limit.

An answer is one line of JSON.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from torchmedic import _isolated as isolated

_MAX_KILL_SECONDS = 1.0  # a process that waits for a driver or a disk does not die, and is left behind


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the installed torch. `why` is the reason if it sees no GPU, `error` if it cannot be imported."""

    version: str = ""
    cuda: str | None = None
    available: bool = False
    devices: int = 0
    why: str = ""
    archs: tuple[str, ...] = ()
    threads: int | None = None
    backward_ends: bool | None = None
    error: str = ""


class Question:
    """A torchmedic module that runs as a program and answers in lines of JSON. Paths in its arguments are absolute."""

    def __init__(self, module: str, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._process = subprocess.Popen(
            isolated.module_command(module, *arguments, environ=environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=isolated.folder(),
            env=isolated.environment(environ),
        )
        self._heard: dict[int, bytes] = {1: b"", 2: b""}
        self._selector = selectors.DefaultSelector()
        for stream, number in ((self._process.stdout, 1), (self._process.stderr, 2)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, number)

    def line(self, limit: float) -> Any:
        """The next line, decoded.

        Raises:
            TimeoutError: No line came in time.
            EOFError: The program ended without one; the text is the last line of its stderr.
        """
        end = time.monotonic() + limit
        while b"\n" not in self._heard[1]:
            if not self._selector.get_map():
                words = self._heard[2].decode("utf-8", "replace").strip().splitlines()
                raise EOFError(words[-1] if words else f"it ended with status {self._process.wait()}")
            if not self._hear(end - time.monotonic()):
                raise TimeoutError
        line, _, self._heard[1] = self._heard[1].partition(b"\n")
        return msgspec.json.decode(line)

    def _hear(self, limit: float) -> bool:
        events = self._selector.select(max(limit, 0))
        for key, _ in events:
            data = os.read(key.fd, 1 << 16)
            self._heard[key.data] += data
            if not data:
                self._selector.unregister(key.fileobj)
        return bool(events)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_MAX_KILL_SECONDS)
        self._selector.close()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def torch_facts(question: Question, limit: float, trial: float | None) -> TorchFacts:
    """The answer of `observe.installation`.

    Args:
        question: The running program.
        limit: Seconds for the import.
        trial: Seconds for the trial backward pass; None if there is none.
    """
    try:
        facts = msgspec.convert(question.line(limit), TorchFacts)
    except TimeoutError:
        return TorchFacts(error=f"`import torch` did not end in {limit:g} s")
    except (EOFError, msgspec.DecodeError, msgspec.ValidationError) as error:
        return TorchFacts(error=f"torch cannot be imported: {error}")
    if trial is None:
        return facts
    try:
        question.line(trial)
    except TimeoutError:
        return msgspec.structs.replace(facts, backward_ends=False)
    except (EOFError, msgspec.DecodeError):
        return facts
    return msgspec.structs.replace(facts, backward_ends=True)
