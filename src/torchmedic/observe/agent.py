"""The agent: everything of torchmedic that lives in one process of the user's.

`install` is called by `inject/sitecustomize.py` right after torch has been imported for the first time.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torchmedic import contained as containment
from torchmedic.contained import contained
from torchmedic.observe import endings, workers
from torchmedic.observe.batches import Batches
from torchmedic.observe.blackbox import BlackBox
from torchmedic.observe.clock import Clock
from torchmedic.observe.events import Events
from torchmedic.observe.finite import FiniteWatch
from torchmedic.observe.hooks import Hooks
from torchmedic.observe.notes import StepNotes
from torchmedic.records import Fault
from torchmedic.rundir import BLACK_BOX, STACKS, claim_process_folder
from torchmedic.settings import rank

_agent: Agent | None = None


class Agent:
    """What one watched process knows of itself."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.rank = rank() or 0
        self.clock = Clock()
        self.batches = Batches()
        self.folder: Path | None = None
        self.events: Events | None = None
        self.notes = StepNotes()
        self.finite = FiniteWatch(self.turned_bad)
        self.hooks = Hooks(self.clock, self.batches, self.notes, self.finite)
        self._stacks: Any = None
        self._waiting_faults: list[Fault] = []

    def open(self) -> None:
        """Claim a folder in the run and start to write there. A second call does nothing."""
        if self.folder is not None:
            return
        self.folder = claim_process_folder(self.run, self.rank)
        self.clock.box = BlackBox(self.folder / BLACK_BOX)
        self.events = Events(self.folder)
        self.events.write(
            "start",
            pid=os.getpid(),
            rank=self.rank,
            python=sys.version.split()[0],
            torch=str(torch.__version__),
            cuda=torch.version.cuda,
        )
        for fault in self._waiting_faults:
            self.events.fault(fault)
        self._waiting_faults.clear()

    def catch_fatal_signals(self) -> None:
        """Have the stacks of all threads written to the run folder when a signal ends this process."""
        # A faulthandler of the user's own writes where the user wants it; there is only one per process.
        if faulthandler.is_enabled():
            return
        folder = self.run / STACKS
        folder.mkdir(mode=0o700, exist_ok=True)
        self._stacks = open(folder / f"{os.getpid()}.txt", "wb", buffering=0)  # noqa: SIM115 - open to the end
        faulthandler.enable(self._stacks, all_threads=True)

    def fault(self, fault: Fault) -> None:
        if self.events is None:
            self._waiting_faults.append(fault)
        else:
            self.events.fault(fault)

    @contained("observe.exception")
    def raised(self, error: BaseException) -> None:
        """An exception has ended this process's work: find out why, while its frames are alive."""
        self.open()
        self.hooks.paused = True
        _later_stages().exception(error, self)

    @contained("observe.nonfinite")
    def turned_bad(self, optimizer: Any, frame: FrameType, what: str) -> None:
        """NaN or infinity is about to be written into the weights: find its origin, once, and let the run go on."""
        self.finite.on = False
        self.open()
        self.hooks.paused = True
        try:
            _later_stages().nonfinite(optimizer, frame, what, self)
        finally:
            self.hooks.paused = False

    @contained("observe.exit")
    def exiting(self) -> None:
        if self.clock.box is not None:
            self.clock.box.mark_clean_exit()

    @contained("observe.fork")
    def forked(self) -> None:
        """In a forked child: the parent's box and files are not ours to write to."""
        global _agent
        _agent = fresh = Agent(self.run)
        fresh.hooks = self.hooks
        # The hooks are bound to the clock and the batches, which from here on belong to the child.
        fresh.clock, fresh.batches = self.clock, self.batches
        fresh.notes, fresh.finite = self.notes, self.finite
        fresh.clock.box = None
        containment.on_fault(fresh.fault)
        fresh.clock.open_box = fresh.open
        if self._stacks is not None:
            faulthandler.disable()
            fresh.catch_fatal_signals()


def current() -> Agent | None:
    return _agent


def install(run_dir: str) -> None:
    """Start to watch this process."""
    global _agent
    if _agent is not None:
        return
    _agent = agent = Agent(Path(run_dir))
    containment.on_fault(lambda fault: _agent.fault(fault) if _agent else None)
    if multiprocessing.parent_process() is None:
        contained("observe.open")(agent.open)()
    agent.clock.open_box = agent.open
    contained("observe.signals")(agent.catch_fatal_signals)()
    agent.hooks.install()
    contained("observe.worker")(workers.install)()
    contained("observe.endings")(endings.install)(_on_exception)
    os.register_at_fork(after_in_child=_on_fork)
    atexit.register(_on_exit)


def _on_exception(error: BaseException) -> None:
    if _agent is not None:
        _agent.raised(error)


def _on_fork() -> None:
    if _agent is not None:
        _agent.forked()


def _on_exit() -> None:
    if _agent is not None:
        contained("observe.endings")(endings.look_back)(_on_exception)
        _agent.exiting()


def _later_stages() -> Any:
    """The later stages, loaded only when something has failed.

    Named as text because imports point one way: observe knows nobody above it.
    """
    return importlib.import_module("torchmedic.diagnose.in_process")
