"""The agent: everything of torchmedic that lives in one process of the user's.

`install` is called by `inject/sitecustomize.py` right after torch has been imported for the first time.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from torchmedic import contained as containment
from torchmedic.contained import contained, is_short
from torchmedic.observe import next_stages
from torchmedic.observe.checkup.watch import Checkup
from torchmedic.observe.device import cuda_start, hidden_work
from torchmedic.observe.device.device_marks import DeviceMarks
from torchmedic.observe.device.device_queue import CudaQueue
from torchmedic.observe.device.device_waits import DeviceWaits
from torchmedic.observe.failures import exceptions, worker_failures
from torchmedic.observe.failures.quiet_worker_deaths import undisturbed
from torchmedic.observe.fatal_signals import FatalSignals
from torchmedic.observe.heap.growth_watch import LeakWatch
from torchmedic.observe.hooks import Hooks, Step
from torchmedic.observe.hooks.loop_hooks import HabitHooks
from torchmedic.observe.inside.listener import Ear
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.memory import cuda_refusals, headroom, last_numbers
from torchmedic.observe.memory.memory_series import MemorySeries, most_memory
from torchmedic.observe.numbers.finite_watch import FiniteWatch
from torchmedic.observe.numbers.kept_steps import Pasts
from torchmedic.observe.numbers.weight_copies import Rewind
from torchmedic.observe.silent_watch import Suspicions
from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.blackbox import BlackBox
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.events import Events
from torchmedic.observe.step.step_notes import StepNotes
from torchmedic.records import Fault
from torchmedic.runfolder import questions
from torchmedic.runfolder.files import BLACK_BOX, reserve
from torchmedic.runfolder.layout import claim_process_folder, wants_checkup
from torchmedic.settings import rank

_agent: Agent | None = None
_MARKED = 0.005  # seconds: marks of the device would be felt in shorter steps,
_FIRST_STEPS = 100  # but not in so few


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
        self.pasts = Pasts(self.notes, self.batches, self.clock)
        self.rewind = Rewind()
        self.finite = FiniteWatch(self, self.pasts, self.rewind)
        self.suspicions = Suspicions(self)
        self.habits = Habits(self.suspicions.look_at_loop, next_stages.judge_of_loops)
        self.step = Step(self.clock, self.batches, self.notes, self.finite, self.rewind, self.habits)
        self.hooks = Hooks(self.step)
        self.checkup = self.step.checkup = Checkup(self.suspicions)
        self.checkup.evaluation = self.habits.evaluation
        self.checkup.waits = DeviceWaits(
            CudaQueue(), lambda: self.clock.step, lambda: not self.habits.awake, self.habits.waits_measured
        )
        self.leaks = self.step.leaks = LeakWatch(
            self.suspicions.look_at_growth, self.suspicions.tell_holders, lambda: self.clock.step
        )
        self.marks = DeviceMarks()
        self.ear = Ear(self)
        self.device_lost = False  # and that has been explained
        self.signals = FatalSignals(self)
        self.hides_forks = False  # of a process that only tries something

    def open(self) -> None:
        """Claim a folder in the run and start to write there. A second call does nothing."""
        if self.folder is not None:
            return
        self.folder = claim_process_folder(self.run, self.rank)
        self.events = Events(self.folder)
        self.events.write(
            "start",
            pid=os.getpid(),
            rank=self.rank,
            python=sys.version.split()[0],
            torch=str(torch.__version__),
            cuda=torch.version.cuda,
        )
        self.clock.box = BlackBox(self.folder / BLACK_BOX)
        series = MemorySeries(
            self.events.write, lambda: (self.clock.step, self.clock.phase_name), self.leaks.press, most_memory()
        )
        self.clock.gauge.on_reading = series.reading
        reserve(self.folder)

    def fault(self, fault: Fault) -> None:
        """Leave word of a bug of ours where the parent will find it."""
        with contextlib.suppress(Exception):
            self.open()
        if self.events is None or not self.events.fault(fault):
            # Nothing can be written, perhaps on a full disk: then only the user can be told.
            sys.stderr.write(f"torchmedic: a fault of its own was contained, the run goes on ({fault.error})\n")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """With the hooks taking no notice of what is done meanwhile."""
        self.step.paused = True
        try:
            yield
        finally:
            self.step.paused = False

    @contextlib.contextmanager
    def examining(self) -> Iterator[None]:
        """The same, and the parent is told: that the process stands still is our doing."""
        with questions.kept_waiting(self.run, os.getpid()), self.paused():
            yield

    @contained("observe.exception")
    def raised(self, error: BaseException) -> None:
        """An exception has ended this process's work: find out why, while its frames are alive."""
        with headroom.headroom():
            try:
                self._explain(error)
            except Exception as failure:
                if not is_short(failure):
                    raise
                last_numbers.leave_word(error, self)

    def _explain(self, error: BaseException) -> None:
        self.open()
        self.clock.flush()
        self.habits.stop()
        self.checkup.stop()
        with self.examining(), undisturbed():
            next_stages.in_process().exception(error, self)

    @contained("observe.nonfinite")
    def examine(self, optimizer: Any, frame: FrameType, what: str, at: str) -> Any:
        """A number is NaN or infinite: find its origin, while the step that made it is there, and let the run go on."""
        self.open()
        self.checkup.pause()
        with self.examining():
            return next_stages.in_process().nonfinite(optimizer, frame, what, at, self)

    @contained("observe.nonfinite")
    def publish(self, finding: Any) -> None:
        """It has reached the weights, or is about to."""
        next_stages.in_process().publish(finding, self)

    @contained("observe.nonfinite")
    def device_died(self, error: BaseException, frame: FrameType) -> None:
        """The device has failed before the user's own code has come to notice it."""
        self.open()
        with self.examining():
            next_stages.in_process().device_died(error, frame, self)

    def mark(self, what: str) -> None:
        """Have the device say when it has come this far."""
        clock = self.clock
        if clock.usual_step > _MARKED or clock.step < _FIRST_STEPS:
            self.marks.mark(what, clock.step, clock.file, clock.line)

    def usual_step(self) -> tuple[int, float]:
        """The number of the step under way, and how many seconds one takes."""
        return self.clock.step, self.clock.usual_step

    @contained("observe.giving_up")
    def gives_up(self, frame: FrameType) -> None:
        """The script is about to leave by `sys.exit`, with no exception under way."""
        if self.clock.updates or self.clock.micro_step or self.clock.optimizers:
            self.open()
            with self.examining():
                next_stages.in_process().gave_up(frame, self)

    @contained("observe.exit")
    def exiting(self) -> None:
        if self.clock.box is not None:
            self.clock.flush()
            self.clock.box.mark_clean_exit()
        self.habits.judge()
        self.checkup.exiting()

    @contained("observe.fork")
    def forked(self) -> None:
        """In a forked child: the parent's box and files are not ours to write to."""
        if self.events is not None:
            self.events.close()
        self.folder = self.events = None
        self.habits.reset()
        self.checkup.stop()
        self.leaks.stop()
        if self.hides_forks:
            containment.on_fault(None)
            self.signals.let_go()
        else:
            self.signals.forked()

    @contextlib.contextmanager
    def hidden_forks(self) -> Iterator[None]:
        """What is forked inside only tries something: it leaves no word, whatever becomes of it."""
        self.hides_forks = True
        try:
            yield
        finally:
            self.hides_forks = False

    @contained("observe.child_exit")
    def child_ends(self) -> None:
        """A child of `multiprocessing` ends well: it leaves no last words."""
        self.exiting()
        self.ear.close()
        self.signals.child_ended_well()


def current() -> Agent | None:
    return _agent


def install(run_dir: str) -> None:
    """Start to watch this process."""
    global _agent
    if _agent is not None:
        return
    _agent = agent = Agent(Path(run_dir))
    containment.step_aside = set_eval_frame
    containment.hide = hidden_work.hide
    containment.on_fault(lambda fault: _agent.fault(fault) if _agent else None)
    if multiprocessing.parent_process() is None:
        contained("observe.open")(agent.open)()
    agent.clock.open_box = agent.open
    contained("observe.signals")(agent.signals.catch)()
    contained("observe.signals")(agent.signals.share_with_workers)()
    agent.hooks.install()
    if wants_checkup(agent.run):
        contained("observe.install")(HabitHooks(agent.habits, agent.step).install)()
        agent.habits.start()
        contained("observe.leaks")(agent.leaks.start)()
        contained("observe.checkup")(agent.checkup.start)()
    contained("observe.worker")(worker_failures.install)()
    contained("observe.cuda_start")(cuda_start.install)()
    contained("observe.out_of_memory")(cuda_refusals.install)()
    contained("observe.out_of_memory")(headroom.reserve)()
    contained("observe.endings")(exceptions.install)(_on_exception, _on_child_end, _on_giving_up)
    contained("observe.ear")(agent.ear.open)()
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_on_fork)
    atexit.register(_on_exit)


def _on_exception(error: BaseException) -> None:
    if _agent is not None:
        _agent.raised(error)


def _on_child_end() -> None:
    if _agent is not None:
        _agent.child_ends()


def _on_giving_up(frame: FrameType) -> None:
    if _agent is not None:
        _agent.gives_up(frame)


def _before_fork() -> None:
    if _agent is not None:
        contained("observe.ear")(_agent.ear.before_fork)()


def _after_fork() -> None:
    if _agent is not None:
        contained("observe.ear")(_agent.ear.after_fork_in_parent)()


def _on_fork() -> None:
    if _agent is not None:
        _agent.clock.box = None  # before anything else can go wrong: two writers would spoil it
        _agent.forked()
        if not _agent.hides_forks:
            contained("observe.ear")(_agent.ear.after_fork_in_child)()


def _on_exit() -> None:
    if _agent is not None:
        contained("observe.endings")(exceptions.look_back)(_on_exception)
        _agent.exiting()
