"""Exceptions that only report the failure of another process: the cause is looked for there.

A worker that fills memory within a second is gone before anybody could ask it. The other workers of its loader do the
same work, and stand still now that nobody takes a batch from them: so they are asked what they hold.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from types import TracebackType
from typing import Any

from torchmedic.detect.failures.death import REQUESTED, is_told_by_loader, lost_senders, named_death, raised_elsewhere
from torchmedic.observe.context import ProcessContext
from torchmedic.records import StackFrame
from torchmedic.runfolder import files, questions
from torchmedic.runfolder.confidential import is_confidential
from torchmedic.runfolder.events import folder_of
from torchmedic.source.user_code import is_user_file

_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited", re.IGNORECASE)
_ENDED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) exited unexpectedly")
_MAX_WAIT_SECONDS = 2.0  # for the diagnosis of another rank
_MAX_WAIT_FOR_WORKERS_SECONDS = 5.0  # for an answer


def is_echo(error: BaseException, agent: ProcessContext) -> bool:
    """Whether this exception needs no explanation of its own; what it tells is passed on to the parent."""
    events = agent.open().events
    for pid in [raised_elsewhere(error), *_ended_workers(error)]:
        folder = folder_of(agent.run, pid) if pid is not None else None
        if folder is not None and files.read_diagnoses(folder):
            events.write("echo", pid=pid)
            return True
    if is_told_by_loader(error):
        events.write("echo", pid=os.getpid())
        return True
    if agent.rank > 0 and _met_nobody(error) and _is_explained_soon(agent):
        events.write("echo", rank=agent.rank)
        return True
    if _lost_another_rank(error):
        if _is_explained_soon(agent):
            events.write("echo", rank=agent.rank)
            return True
        events.write("lost-rank", rank=agent.rank)  # the supervisor of the other rank may be late
    death = named_death(error)
    if death is None or death.signal in REQUESTED:
        return False
    at = _user_line(error.__traceback__)
    events.write("death", pid=death.pid, signal=death.signal, part=death.part, at=at)
    if death.part == "worker" and death.signal == "SIGKILL":
        _ask_survivors(death.pid, agent)
    # A killed worker has left no word of its own: here it is at least known what it was reading.
    return not (death.part == "worker" and death.signal == "SIGKILL")


def _ended_workers(error: BaseException) -> list[int]:
    """The DataLoader workers whose end an exception tells of: one without memory cannot send its own."""
    found = _ENDED.search(str(error)) if isinstance(error, RuntimeError) else None
    named = [int(pid) for pid in found[1].split(",")] if found is not None else []
    return [*named, *(worker.pid for worker in lost_senders(error))]


def ask_other_ranks(agent: ProcessContext) -> None:
    """Note the time of an exception in a job of several ranks, and have the other ranks write down where they are."""
    if _is_of_job():
        agent.open().events.write("raised")
        for pid in questions.listeners(agent.run):
            if pid != os.getpid():
                questions.ask(agent.run, pid, questions.GLANCE)


def _is_of_job() -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def _lost_another_rank(error: BaseException) -> bool:
    """Whether the connection to another rank broke: that one has failed, and this one only noticed."""
    return isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)) is not None and _is_of_job()


def _met_nobody(error: BaseException) -> bool:
    """Whether a rank did not find the others when the job began: rank 0, where they meet, knows more."""
    distributed = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "DistError", None)
    return kind is not None and isinstance(error, kind) and not distributed.is_initialized()  # type: ignore[union-attr]


def _is_explained_soon(agent: ProcessContext) -> bool:
    """Whether the other rank is diagnosed by now, or within a short wait."""
    end = time.monotonic() + _MAX_WAIT_SECONDS
    while not (explained := files.errors_of_others(agent.run, agent.rank)) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(explained)


def _user_line(tb: TracebackType | None) -> StackFrame | None:
    found = None
    while tb is not None:
        code = tb.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = StackFrame(file=code.co_filename, line=tb.tb_lineno or code.co_firstlineno, function=code.co_name)
        tb = tb.tb_next
    return found


def _ask_survivors(killed: int, agent: ProcessContext) -> None:
    """Have a worker of the same loader write down what it holds, for the parent to read."""
    if is_confidential(agent.run):
        return
    alike = (getattr(iterator, "_workers", ()) for iterator in agent.batches.iterators())
    others = [worker for workers in alike if any(each.pid == killed for each in workers) for worker in workers]
    before = {worker.pid: _answered(worker, agent) for worker in others}
    asked = [
        worker for worker in others if worker.pid != killed and questions.ask(agent.run, worker.pid, questions.HOLD)
    ]
    end = time.monotonic() + _MAX_WAIT_FOR_WORKERS_SECONDS
    while asked and time.monotonic() < end:
        time.sleep(0.02)
        asked = [each for each in asked if each.exitcode is None and _answered(each, agent) == before[each.pid]]


def _answered(worker: Any, agent: ProcessContext) -> int:
    """When a worker last wrote down what it holds, in nanoseconds; 0 for never."""
    with contextlib.suppress(OSError):
        return questions.held(agent.run, worker.pid).stat().st_mtime_ns
    return 0
