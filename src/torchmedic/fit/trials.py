"""Runs of a script with changes, each in a process of its own that is forked from this one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from torchmedic.fit.cards import Card
from torchmedic.fit.changes import Change
from torchmedic.fit.script import trace_script
from torchmedic.records.fit import Trace


class Trials:
    """Runs the script as often as asked, and remembers the results.

    This process must not have run operations of torch: their threads do not survive a fork.
    """

    def __init__(self, script: Path, arguments: tuple[str, ...], card: Card, seconds: float) -> None:
        __import__("torch._dynamo")  # every run would load it
        self.script = script
        self.arguments = arguments
        self.card = card
        self._seconds = seconds
        self._known: dict[Change, Trace] = {}
        self.last = 0.0  # seconds that the last run took

    def run(self, change: Change) -> Trace:
        """The course of memory with a change; `error` says why there is none."""
        known = self._known.get(change)
        if known is None:
            started = time.monotonic()
            known = self._known[change] = self._forked(change)
            self.last = time.monotonic() - started
        return known

    def _forked(self, change: Change) -> Trace:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._child(writer, change)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            content = pipe.read()
        _, status = os.waitpid(child, 0)
        try:
            return msgspec.msgpack.decode(content, type=Trace)
        except msgspec.DecodeError:
            return Trace(error=_death(os.waitstatus_to_exitcode(status)))

    def _child(self, writer: int, change: Change) -> None:
        """Run the script with its output muted, and end this process."""
        status = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            sys.stdout = sys.stderr = os.fdopen(os.dup(null), "w")
            trace = trace_script(self.script, self.arguments, self.card, change, self._seconds)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(trace))
            status = 0
        except BaseException as error:
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(Trace(error=f"{type(error).__name__}: {error}")))
        finally:
            os._exit(status)


def _death(code: int) -> str:
    if code < 0:
        return f"the process that followed the script was ended by {signal.Signals(-code).name}"
    return f"the process that followed the script ended with status {code}"
