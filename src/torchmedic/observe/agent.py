"""The agent: everything of torchmedic that lives in one process of the user's.

`install` is called by `inject/sitecustomize.py` right after torch has been imported for the first time.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from torchmedic import contained as containment
from torchmedic.contained import contained
from torchmedic.observe import cuda_start, endings, headroom, no_room, out_of_memory, worker_leaks, workers
from torchmedic.observe.batches import Batches
from torchmedic.observe.blackbox import BlackBox
from torchmedic.observe.checkup import Checkup
from torchmedic.observe.clock import Clock
from torchmedic.observe.device_marks import DeviceMarks
from torchmedic.observe.device_queue import CudaQueue
from torchmedic.observe.device_waits import DeviceWaits
from torchmedic.observe.events import Events
from torchmedic.observe.finite import FiniteWatch
from torchmedic.observe.habit_hooks import HabitHooks
from torchmedic.observe.habits import Habits
from torchmedic.observe.hooks import Hooks, Step
from torchmedic.observe.inside.ear import Ear
from torchmedic.observe.leaks import LeakWatch
from torchmedic.observe.memory_series import MemorySeries, most_memory
from torchmedic.observe.notes import StepNotes
from torchmedic.observe.past import Pasts
from torchmedic.observe.rewind import Rewind
from torchmedic.records import Fault
from torchmedic.rundir import BLACK_BOX, STACKS, claim_process_folder, reserve, wants_checkup
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
        self.habits = Habits(self._look_at_loop, _judge_of_loops)
        self.step = Step(self.clock, self.batches, self.notes, self.finite, self.rewind, self.habits)
        self.hooks = Hooks(self.step)
        self.checkup = self.step.checkup = Checkup(self)
        self.checkup.evaluation = self.habits.evaluation
        self.checkup.waits = DeviceWaits(
            CudaQueue(), lambda: self.clock.step, lambda: not self.habits.awake, self.habits.waits_measured
        )
        self._suspected: set[Any] = set()  # of the loop, which the rules have been asked about
        self.leaks = self.step.leaks = LeakWatch(self._look_at_growth, self._tell_holders, lambda: self.clock.step)
        self.marks = DeviceMarks()
        self.ear = Ear(self)
        self.device_lost = False  # and that has been explained
        self._stacks: Any = None
        self._catches = False
        self._kept_iterators: list[Any] = []  # of loaders whose workers have failed

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

    def catch_fatal_signals(self) -> None:
        """Have the stacks of all threads written to the run folder when a signal ends this process."""
        folder = self.run / STACKS
        folder.mkdir(mode=0o700, exist_ok=True)
        # The file is also how the parent learns of this process.
        self._stacks = open(folder / f"{os.getpid()}.txt", "wb", buffering=0)  # noqa: SIM115 - open to the end
        # A faulthandler of the user's own writes where the user wants it; there is only one per process.
        if not faulthandler.is_enabled():
            faulthandler.enable(self._stacks, all_threads=True)
            self._catches = True

    def share_worker_signals(self) -> None:
        """A DataLoader worker sets handlers of torch's own for the same signals: have both, ours first."""
        from torch.utils.data._utils import signal_handling

        name = "_set_worker_signal_handlers"
        original = getattr(signal_handling, name)

        @functools.wraps(original)
        def both(*args: Any, **kwargs: Any) -> Any:
            ours = self._catches
            if ours:
                faulthandler.disable()
            result = original(*args, **kwargs)
            if ours:
                faulthandler.enable(self._stacks, all_threads=True)
            if self.ear.forked:
                contained("observe.worker")(workers.end_with_parent)()
            worker_leaks.start(sys._getframe(1), self.run, self.rank, _judge_of_growth, _later_stages)
            return result

        setattr(signal_handling, name, both)
        news = "_error_if_any_worker_fails"
        setattr(signal_handling, news, self._keeping_iterators(getattr(signal_handling, news)))

    def _keeping_iterators(self, original: Any) -> Any:
        """A handler that raises in the middle of anything ends the loop, and with it the iterator and its dataset."""

        @functools.wraps(original)
        def _error_if_any_worker_fails() -> None:
            try:
                original()
            except RuntimeError:
                self._kept_iterators = self.batches.iterators()
                raise

        return _error_if_any_worker_fails

    def fault(self, fault: Fault) -> None:
        """Leave word of a bug of ours where the parent will find it."""
        with contextlib.suppress(Exception):
            self.open()
        if self.events is None or not self.events.fault(fault):
            # Nothing can be written, perhaps on a full disk: then only the user can be told.
            sys.stderr.write(f"torchmedic: a fault of its own was contained, the run goes on ({fault.error})\n")

    @contained("observe.silent")
    def check_up(self, graphs: Any, frame: FrameType) -> None:
        """The graphs of the first steps are known."""
        self._ask_about_step(graphs, None, frame)

    @contained("observe.silent")
    def left_out(self, unreached: Any, frame: FrameType | None) -> None:
        """Some parameters had no gradient in several steps."""
        self._ask_about_step((), unreached, frame)

    def _ask_about_step(self, graphs: Any, unreached: Any, frame: FrameType | None) -> None:
        if not self.finite.on or self.device_lost:
            return  # something else went wrong, and has been said
        self.step.paused = True
        try:
            _later_stages().check_up(graphs, unreached, frame, self)
        finally:
            self.step.paused = False

    @contained("observe.silent")
    def _look_at_loop(self, habits: Habits) -> None:
        """There is enough in the ledger to be judged."""
        if not self.finite.on or self.device_lost:
            return  # something else went wrong, and has been said
        incidents = [
            incident
            for incident in _judge_of_loops().incidents(habits)
            if (incident.kind, incident.cause) not in self._suspected
        ]
        if not incidents:
            return
        self._suspected.update((incident.kind, incident.cause) for incident in incidents)
        self.step.paused = True
        try:
            _later_stages().silent(incidents, self)
        finally:
            self.step.paused = False

    @contained("observe.leaks")
    def _look_at_growth(self, watch: LeakWatch, frame: FrameType) -> None:
        """Something has grown at every one of the last looks."""
        if not self.finite.on or self.device_lost:
            return  # something else went wrong, and has been said
        found = [growth for growth in _judge_of_growth().growths(watch) if watch.wants_to_know(growth)]
        if not found:
            return
        self.step.paused = True
        try:
            _later_stages().growing(found, watch.looks, frame, self)
        finally:
            self.step.paused = False

    @contained("observe.leaks")
    def _tell_holders(self, holders: Any) -> None:
        """Memory is short: leave word of who holds it."""
        _later_stages().holding(holders, self)

    @contained("observe.exception")
    def raised(self, error: BaseException) -> None:
        """An exception has ended this process's work: find out why, while its frames are alive."""
        try:
            self._explain(error)
        except Exception as failure:
            if not no_room.is_short(failure):
                raise
            no_room.leave_word(error, self)

    def _explain(self, error: BaseException) -> None:
        self.open()
        self.clock.flush()
        self.habits.stop()
        self.checkup.stop()
        self.step.paused = True
        try:
            with workers.undisturbed(), headroom.headroom():
                _later_stages().exception(error, self)
        finally:
            self.step.paused = False

    @contained("observe.nonfinite")
    def examine(self, optimizer: Any, frame: FrameType, what: str, at: str) -> Any:
        """A number is NaN or infinite: find its origin, while the step that made it is there, and let the run go on."""
        self.open()
        self.checkup.pause()
        self.step.paused = True
        try:
            return _later_stages().nonfinite(optimizer, frame, what, at, self)
        finally:
            self.step.paused = False

    @contained("observe.nonfinite")
    def publish(self, finding: Any) -> None:
        """It has reached the weights, or is about to."""
        _later_stages().publish(finding, self)

    @contained("observe.nonfinite")
    def device_died(self, error: BaseException, frame: FrameType) -> None:
        """The device has failed before the user's own code has come to notice it."""
        self.open()
        self.step.paused = True
        try:
            _later_stages().device_died(error, frame, self)
        finally:
            self.step.paused = False

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
            self.step.paused = True
            try:
                _later_stages().gave_up(frame, self)
            finally:
                self.step.paused = False

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
        if self._catches:
            faulthandler.disable()
            self._catches = False
        self.catch_fatal_signals()

    @contained("observe.child_exit")
    def child_ends(self) -> None:
        """A child of `multiprocessing` ends well: its file of last words, still empty, has served its purpose."""
        self.exiting()
        self.ear.close()
        if self._stacks is not None and os.fstat(self._stacks.fileno()).st_size == 0:
            os.unlink(self._stacks.name)


def current() -> Agent | None:
    return _agent


def install(run_dir: str) -> None:
    """Start to watch this process."""
    global _agent
    if _agent is not None:
        return
    _agent = agent = Agent(Path(run_dir))
    containment.step_aside = set_eval_frame
    containment.on_fault(lambda fault: _agent.fault(fault) if _agent else None)
    if multiprocessing.parent_process() is None:
        contained("observe.open")(agent.open)()
    agent.clock.open_box = agent.open
    contained("observe.signals")(agent.catch_fatal_signals)()
    contained("observe.signals")(agent.share_worker_signals)()
    agent.hooks.install()
    if wants_checkup(agent.run):
        contained("observe.install")(HabitHooks(agent.habits, agent.step).install)()
        agent.habits.start()
        contained("observe.leaks")(agent.leaks.start)()
        contained("observe.checkup")(agent.checkup.start)()
    contained("observe.worker")(workers.install)()
    contained("observe.cuda_start")(cuda_start.install)()
    contained("observe.out_of_memory")(out_of_memory.install)()
    contained("observe.out_of_memory")(headroom.reserve)()
    contained("observe.endings")(endings.install)(_on_exception, _on_child_end, _on_giving_up)
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
        contained("observe.ear")(_agent.ear.after_fork_in_child)()


def _on_exit() -> None:
    if _agent is not None:
        contained("observe.endings")(endings.look_back)(_on_exception)
        _agent.exiting()


def _judge_of_loops() -> Any:
    """What tells a mistake from a habit; named as text because imports point one way."""
    return importlib.import_module("torchmedic.detect.silent")


def _judge_of_growth() -> Any:
    return importlib.import_module("torchmedic.detect.growth")


def _later_stages() -> Any:
    """The later stages, loaded only when something has failed.

    Named as text because imports point one way: observe knows nobody above it.
    """
    return importlib.import_module("torchmedic.diagnose.in_process")
