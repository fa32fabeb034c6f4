"""Exceptions that are only the news of what happened in another process, which is where the cause is looked for."""

from __future__ import annotations

import re
import sys
import time
from types import TracebackType
from typing import Any

from torchmedic import rundir
from torchmedic.detect.death import REQUESTED, named_death, raised_elsewhere
from torchmedic.observe.frames import is_user_file
from torchmedic.records import StackFrame

_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited", re.IGNORECASE)
_PATIENCE = 2.0  # seconds


def is_echo(error: BaseException, agent: Any) -> bool:
    """Whether this exception needs no explanation of its own; what it tells is passed on to the parent."""
    pid = raised_elsewhere(error)
    if pid is not None:
        folder = rundir.folder_of(agent.run, pid)
        if folder is not None and rundir.read_diagnoses(folder):
            agent.events.write("echo", pid=pid)
            return True
    if _lost_another_rank(error) and _is_explained_soon(agent):
        agent.events.write("echo", rank=agent.rank)
        return True
    death = named_death(error)
    if death is None or death.signal in REQUESTED:
        return False
    at = _user_line(error.__traceback__)
    agent.events.write("death", pid=death.pid, signal=death.signal, part=death.part, at=at)
    # A killed worker has left no word of its own: here it is at least known what it was reading.
    return not (death.part == "worker" and death.signal == "SIGKILL" and isinstance(error, RuntimeError))


def _lost_another_rank(error: BaseException) -> bool:
    """Whether the connection to another rank broke: that one has failed, and this one only noticed."""
    distributed = sys.modules.get("torch.distributed")
    if not isinstance(error, RuntimeError | OSError) or not _LOST.search(str(error)) or distributed is None:
        return False
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


def _is_explained_soon(agent: Any) -> bool:
    """Whoever watches the other rank may be at it just now."""
    end = time.monotonic() + _PATIENCE
    while not (explained := rundir.is_explained_by_another(agent.run, agent.rank)) and time.monotonic() < end:
        time.sleep(0.05)
    return explained


def _user_line(tb: TracebackType | None) -> StackFrame | None:
    found = None
    while tb is not None:
        code = tb.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = StackFrame(file=code.co_filename, line=tb.tb_lineno, function=code.co_name)
        tb = tb.tb_next
    return found
