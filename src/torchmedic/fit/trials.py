"""Runs of a script with changes, each in a process of its own that is forked from this one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
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

    def run(self, change: Change) -> Trace:
        """The course of memory with a change; `error` says why there is none."""
        known = self._known.get(change)
        if known is None:
            known = self._known[change] = self._end(*self._begin(change))
        return known

    def prepare(self, changes: Iterable[Change]) -> None:
        """Run several changes at a time, so that `run` knows them."""
        new = [change for change in dict.fromkeys(changes) if change not in self._known]
        at_once = max(1, len(os.sched_getaffinity(0)))
        for start in range(0, len(new), at_once):
            begun = [(change, *self._begin(change)) for change in new[start : start + at_once]]
            for change, child, reader in begun:
                self._known[change] = self._end(child, reader)

    def _begin(self, change: Change) -> tuple[int, int]:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._child(writer, change)
        os.close(writer)
        return child, reader

    def _end(self, child: int, reader: int) -> Trace:
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
