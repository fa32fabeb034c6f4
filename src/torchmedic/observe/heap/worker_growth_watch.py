"""What grows inside of a DataLoader worker: a data set that collects what it has read, a cache that has no end.

A worker has memory of its own, so that nobody sees from outside who holds it. The first worker of a loader looks from
inside, after some of its batches, and only at the data set and what functions and modules of the user's hold: every
object that a forked process looks at costs it a copy of a page.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

from torchmedic.contained import contained
from torchmedic.observe.budget import Budget
from torchmedic.observe.context import ProcessFolder, ReportingProcess
from torchmedic.observe.heap.growth_watch import LeakWatch
from torchmedic.observe.memory.usage import most_memory, resident_bytes
from torchmedic.observe.stages import GrowthStages
from torchmedic.observe.step.events import Events
from torchmedic.runfolder import layout
from torchmedic.source.user_variables import locals_of

_MAX_OBJECTS = 1500  # of one walk
_MAX_SHARE = 0.5  # of all memory that all workers together may take before the holders are told
_MIN_RISE = 1.1  # times the memory at the last time
_MIN_BYTES = 32 << 20  # of data that are worth an explanation
_PAUSE_SECONDS = 3.0  # between two looks at the memory of the worker


class WorkerAgent:
    """The part of an agent that rules about growth need: no black box, and a folder only once there is a diagnosis."""

    def __init__(self, run: Path, rank: int, worker: int, workers: int) -> None:
        self.run = run
        self.rank = rank
        self.workers = workers
        self.loader_worker = (worker, workers)
        self._folder: ProcessFolder | None = None
        self.batches = 0

    @property
    def clock(self) -> WorkerAgent:
        """Batches are the steps of a worker."""
        return self

    @property
    def step(self) -> int:
        return self.batches

    def open(self) -> ProcessFolder:
        if self._folder is None:
            path = layout.claim_worker_folder(self.run, self.rank)
            self._folder = ProcessFolder(path, Events(path))
            self._folder.events.write("start", pid=os.getpid(), worker=self.loader_worker[0])
        return self._folder


class WorkerLeaks:
    """Counts the batches of one worker and looks now and then."""

    def __init__(self, agent: WorkerAgent, stages: GrowthStages, *, ends: bool) -> None:
        self._agent = agent
        self._stages = stages
        self._ends = ends  # whether a pass over the data has an end, at which a cache would have all of it
        self._most = most_memory()
        self._due = 0.0
        self._at_start = resident_bytes()  # nearly all of it is shared with the process that it was forked from
        self._pressed = 0
        self.watch = LeakWatch(
            self._ask, stages.report_holders, lambda: agent.batches, Budget().leaks, most=_MAX_OBJECTS
        )
        self.watch.start()

    def begin(self, data: Any, collate: Any, frame: FrameType) -> None:
        self.watch.watch_data(data)
        self.watch.watch_data(collate)
        self.next_pass(frame)

    def next_pass(self, frame: FrameType) -> None:
        self.watch.mark("pass of a worker" if self._ends else "stream of a worker", frame)

    @contained("observe.leaks")
    def sent(self, what: Any, frame: FrameType) -> None:
        """A batch has been sent, or the message that a new pass begins."""
        if type(what).__name__ == "_ResumeIteration":
            self.next_pass(frame)
            return
        agent, watch = self._agent, self.watch
        agent.batches += 1
        now = perf_counter()
        if now >= self._due:
            self._due = now + _PAUSE_SECONDS
            own = resident_bytes() - self._at_start
            if own * agent.workers > _MAX_SHARE * self._most and own > _MIN_RISE * self._pressed:
                self._pressed = own
                watch.press()
        if agent.batches >= watch.due:
            watch.stepped(agent.batches, frame)

    def _ask(self, watch: LeakWatch, frame: FrameType) -> None:
        self._stages.examine_growth(watch, frame, min_data_bytes=_MIN_BYTES)


@contained("observe.worker")
def start(frame: FrameType, run: Path, rank: int, stages: Callable[[ReportingProcess], GrowthStages]) -> None:
    """Called as a worker begins, with the frame of its loop."""
    known = dict(locals_of(frame))
    if known.get("worker_id") != 0 or not layout.wants_checkup(run):
        return
    data, queue = known["dataset"], known["data_queue"]
    agent = WorkerAgent(run, rank, known["worker_id"], int(known["num_workers"]))
    leaks = WorkerLeaks(agent, stages(agent), ends=hasattr(data, "__len__"))
    leaks.begin(data, known.get("collate_fn"), frame)
    original = queue.put

    @functools.wraps(original)
    def put(sent: Any, *args: Any, **kwargs: Any) -> None:
        original(sent, *args, **kwargs)
        leaks.sent(sent[0] if isinstance(sent, tuple) and sent else sent, sys._getframe(1))

    queue.put = put
