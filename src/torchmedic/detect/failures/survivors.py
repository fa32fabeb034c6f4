"""Workers that live on when another one was killed: what they hold, that one held too.

A worker that fills memory within a second is gone before anybody could ask it. The others of its loader do the same
work, and stand still now that nobody takes a batch from them: so they are asked.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from torchmedic.observe.context import ProcessContext
from torchmedic.runfolder import questions
from torchmedic.runfolder.confidential import is_confidential

_MAX_WAIT_SECONDS = 5.0  # for an answer


def ask(killed: int, agent: ProcessContext) -> None:
    """Have a worker of the same loader write down what it holds, for the parent to read."""
    if is_confidential(agent.run):
        return
    alike = (getattr(iterator, "_workers", ()) for iterator in agent.batches.iterators())
    others = [worker for workers in alike if any(each.pid == killed for each in workers) for worker in workers]
    before = {worker.pid: _answered(worker, agent) for worker in others}
    asked = [
        worker for worker in others if worker.pid != killed and questions.ask(agent.run, worker.pid, questions.HOLD)
    ]
    end = time.monotonic() + _MAX_WAIT_SECONDS
    while asked and time.monotonic() < end:
        time.sleep(0.02)
        asked = [each for each in asked if each.exitcode is None and _answered(each, agent) == before[each.pid]]


def _answered(worker: Any, agent: ProcessContext) -> int:
    """When a worker last wrote down what it holds, in nanoseconds; 0 for never."""
    with contextlib.suppress(OSError):
        return questions.held(agent.run, worker.pid).stat().st_mtime_ns
    return 0
