"""The agent: everything of torchmedic that lives in one process of the user's.

`lifecycle.py` installs it. What the agent notices is explained by the stages that are handed in (`stages.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from torchmedic import contained as containment
from torchmedic.contained import contained, fault_line, is_short
from torchmedic.observe.budget import Budget
from torchmedic.observe.checkup.watch import Checkup
from torchmedic.observe.context import ProcessContext, ProcessFolder
from torchmedic.observe.device.device_marks import DeviceMarks
from torchmedic.observe.device.device_queue import CudaQueue
from torchmedic.observe.device.device_waits import DeviceWaits
from torchmedic.observe.failures import exceptions
from torchmedic.observe.fatal_signals import FatalSignals
from torchmedic.observe.heap.growth_watch import LeakWatch
from torchmedic.observe.hooks import Hooks, Step
from torchmedic.observe.inside.listener import Listener
from torchmedic.observe.loop.event_writer import EventWriter
from torchmedic.observe.memory import headroom, last_numbers
from torchmedic.observe.memory.usage import DeviceMemory, MemorySeries, most_memory
from torchmedic.observe.numbers.finite_watch import FiniteWatch
from torchmedic.observe.numbers.kept_steps import KeptBackwards
from torchmedic.observe.numbers.weight_copies import Rewind
from torchmedic.observe.ranks import flight_recorder
from torchmedic.observe.ranks.facts import FactsOfRank
from torchmedic.observe.ranks.recorder import Recorder
from torchmedic.observe.silent_watch import Suspicions
from torchmedic.observe.stages import Finding, Quantity, Stages, UpdateStage
from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.blackbox import BlackBox, FileBox, hand_over
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.events import Events
from torchmedic.observe.step.step_notes import StepNotes
from torchmedic.observe.torch_settings import torch_settings
from torchmedic.records import Fault
from torchmedic.records.ranks import Fate
from torchmedic.runfolder import questions
from torchmedic.runfolder.black_box import bytes_of
from torchmedic.runfolder.confidential import is_confidential, shown_fault
from torchmedic.runfolder.files import BLACK_BOX, release, reserve, write_atomically
from torchmedic.runfolder.layout import box_address, claim_process_folder, wants_checkup
from torchmedic.settings import job_identity, rank

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MIN_MARKED_STEP_SECONDS = 0.005  # in shorter steps, marks on the device would be felt,
_ALWAYS_MARKED_STEPS = 100  # except in the first few


class Agent:
    """What one watched process knows of itself."""

    def __init__(self, run: Path, stages: Callable[[ProcessContext], Stages], claimed: Path | None = None) -> None:
        self.run = run
        self.rank = rank() or 0
        self.clock = Clock()
        self.batches = Batches()
        self.loader_worker = None
        self.claimed = claimed  # the folder of this process in the run
        self._folder: ProcessFolder | None = None  # once it can be written to
        self._has_settings = False  # those of torch have been written
        self._complained = False  # on stderr, where nothing could be written
        self.notes = StepNotes()
        self.kept_backwards = KeptBackwards(self.notes, self.batches, self.clock)
        self.rewind = Rewind()
        self.budget = Budget()
        self.finite = FiniteWatch(self, self.kept_backwards, self.rewind, self.budget)
        self.stages = stages(self)
        self.suspicions = Suspicions(self)
        self.habits = EventWriter(self.suspicions.look_at_loop, self.stages.prepare_loop)
        self.step = Step(self.clock, self.batches, self.notes, self.finite, self.rewind, self.habits)
        self.hooks = Hooks(self.step)
        self.checkup = self.step.checkup = Checkup(self.suspicions)
        self.checkup.evaluation = self.habits.evaluation
        self.checkup.waits = DeviceWaits(
            CudaQueue(), lambda: self.clock.step, lambda: not self.habits.awake, self.habits.waits_measured
        )
        self.leaks = self.step.leaks = LeakWatch(
            self.suspicions.look_at_growth, self.suspicions.tell_holders, lambda: self.clock.step, self.budget.leaks
        )
        self.marks = DeviceMarks()
        self.listener = Listener(self, self.stages.locate_holders)
        self.collectives = self.step.collectives = Recorder(self._join, self._hand_over)
        self.device_lost = False  # and that has been explained
        self.raised_at = 0.0
        self.signals = FatalSignals(self)
        self.hides_forks = False  # of a process that only tries something

    def open(self) -> ProcessFolder:
        """The folder of this process in the run; the first call claims it and starts to write there."""
        if self._folder is not None:
            return self._folder
        if self.claimed is None:
            self.claimed = claim_process_folder(self.run, self.rank)
        self._folder = folder = ProcessFolder(self.claimed, Events(self.claimed))
        box = contained("observe.box")(self._new_box)(folder.path)
        folder.events.write(
            "start",
            pid=os.getpid(),
            box=None if box is None else box.descriptor,
            rank=self.rank,
            python=sys.version.split()[0],
            torch=str(torch.__version__),
            cuda=torch.version.cuda,
        )
        self.clock.box = box
        self.signals.origin.write_to(box)
        series = MemorySeries(
            folder.events.write, lambda: (self.clock.step, self.clock.phase_name), self.leaks.press, most_memory()
        )
        curves = self.step.curves
        curves.write = folder.events.write

        def reading(now: float, rss: int, device: DeviceMemory) -> None:
            series.reading(now, rss, device)
            curves.flush(now)

        self.clock.gauge.on_reading = reading
        with contextlib.suppress(OSError):
            reserve(folder.path)
        return folder

    def _join(self, number: int, world_size: int) -> Path:
        """Note that the process has joined a job. Without a launcher (`mp.spawn`), it has a rank only now."""
        if rank() is None:
            self.rank = number
        folder = self.open().path
        if world_size > 1 and wants_checkup(self.run):
            facts = FactsOfRank(folder, number, world_size, self.batches, self.clock)
            self.step.ranks = self.collectives.facts = facts
            self.step.short_steps.is_of_ranks = True
        return folder

    def _new_box(self, folder: Path) -> BlackBox:
        try:
            box = BlackBox()
        except (AttributeError, OSError):  # no memory files here
            return FileBox(folder / BLACK_BOX)
        box.hand_over(self._addresses(), folder.name)
        return box

    def _addresses(self) -> list[Path]:
        """Where the parent process may listen."""
        return [box_address(self.run, self.rank), box_address(self.run, None)]

    def _hand_over(self, descriptor: int, name: str) -> bool:
        return hand_over(descriptor, self._addresses(), name)

    @contained("observe.course")
    def publish_course(self) -> None:
        """Write how the training went so far, for the report: the curves, and the settings once."""
        self.step.fast.leave()
        self.step.curves.flush()
        if self._folder is not None and not self._has_settings and self.clock.optimizer_count:
            self._has_settings = True
            self._folder.events.write("settings", values=torch_settings(self.clock.optimizers, self.notes.autocast))

    @contained("observe.rank_log")
    def publish_collectives(self, fate: Fate = "running") -> None:
        """Write down which collectives this process has called, for the parents of all ranks, on other hosts too."""
        log = flight_recorder.publish(self._folder.path) if self._folder is not None else None
        mail = self.collectives.mail
        if log is not None and mail is not None and mail.is_needed(log) and not is_confidential(self.run):
            mail.exchange(self.run, log, fate)

    def fault(self, fault: Fault) -> None:
        """Write down a bug of torchmedic's own where the parent will find it."""
        with contextlib.suppress(Exception):
            self.open()
        if self._folder is not None:
            if self._folder.events.fault(fault):
                return
            release(self._folder.path)
            if self._folder.events.fault(fault):
                return
        if not self._complained:  # nothing can be written: then only the user can be told
            self._complained = True
            sys.stderr.write(fault_line(shown_fault(fault) if is_confidential(self.run) else fault))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the hooks ignore what is done."""
        before = self.step.paused, self.collectives.paused
        self.step.paused = self.collectives.paused = True
        self.step.fast.on = False
        try:
            yield
        finally:
            self.step.paused, self.collectives.paused = before
            self.step.paused |= self.step.is_crowded

    @contextlib.contextmanager
    def examining(self) -> Iterator[None]:
        """A pause of the hooks that the parent is told of: the process stands still because it is examined."""
        with questions.kept_waiting(self.run, os.getpid()), self.paused():
            yield

    @contained("observe.exception")
    def raised(self, error: BaseException) -> None:
        """An exception has ended this process's work: find out why, while its frames are alive."""
        self.raised_at = time.time()
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
        self.publish_course()
        self.publish_collectives("raised")
        self.habits.stop()
        self.checkup.stop()
        with self.examining(), exceptions.undisturbed():
            self.stages.explain_exception(error)

    @contained("observe.nonfinite")
    def examine(
        self, optimizer: Optimizer | None, frame: FrameType, quantity: Quantity, stage: UpdateStage
    ) -> Finding | None:
        """A number is NaN or infinite: find its origin, while the step that made it is there, and let the run go on."""
        self.open()
        self.checkup.pause()
        with self.examining():
            return self.stages.explain_nonfinite(optimizer, frame, quantity, stage)

    @contained("observe.nonfinite")
    def publish(self, finding: Finding) -> None:
        """The bad number has reached the weights, or is about to."""
        self.publish_course()
        with self.examining():
            self.stages.publish(finding)

    @contained("observe.nonfinite")
    def device_died(self, error: BaseException, frame: FrameType) -> None:
        """The device has failed before the user's own code has come to notice it."""
        self.open()
        with self.examining():
            self.stages.explain_lost_device(error, frame)

    def mark(self, what: str) -> None:
        """Have the device say when it has come this far."""
        clock = self.clock
        if clock.usual_step > _MIN_MARKED_STEP_SECONDS or clock.step < _ALWAYS_MARKED_STEPS:
            self.marks.mark(what, clock.step, clock.file, clock.line)

    def usual_step(self) -> tuple[int, float]:
        """The number of the step under way, and how many seconds one takes."""
        return self.clock.step, self.clock.usual_step

    @contained("observe.giving_up")
    def gives_up(self, frame: FrameType, has_failed: bool) -> None:
        """The script is about to leave by `sys.exit`, with no exception under way."""
        if self.step.paused:
            return  # a replay does so
        # Of a rank that gives up before it has joined its job, the launcher knows only the exit status.
        unjoined = self.open().path if has_failed and job_identity(os.environ) is not None else None
        self.collectives.leaves("sys.exit()", frame, has_failed=has_failed, otherwise=unjoined)
        if self.clock.updates or self.clock.micro_step or self.clock.optimizers:
            self.open()
            with self.examining():
                self.stages.explain_exit(frame)

    @contained("observe.exit")
    def exiting(self) -> None:
        self.publish_course()
        if self.clock.box is not None:
            self.clock.flush()
            self.clock.box.mark_clean_exit()
        self.publish_collectives("ended")
        if not self.raised_at:
            self.finite.run_ends()
        self.habits.standstill.ending(self.clock.updates, is_loss_still=self.finite.memory.is_still)
        if self.step.ranks is not None:
            self.step.ranks.exiting()
        self.habits.ending()
        self.checkup.exiting()

    def close(self) -> None:
        """Keep the black box in the run folder, and give up its memory: a watched part of the process is over."""
        box, self.clock.box, self.clock.open_box = self.clock.box, None, None
        self.signals.origin.write_to(None)
        if box is not None:
            if self._folder is not None and box.descriptor is not None:
                with contextlib.suppress(OSError):
                    write_atomically(self._folder.path / BLACK_BOX, bytes_of(box.descriptor))
            box.close()
        if self._folder is not None:
            release(self._folder.path)
            self._folder.events.close()
            self._folder = None

    @contained("observe.fork")
    def forked(self) -> None:
        """Let go of the parent's black box and files in a forked child."""
        if self._folder is not None:
            self._folder.events.close()
        self._folder = self.claimed = None
        self.rank = rank() or 0
        self.step.ranks = None
        self.step.short_steps.is_of_ranks = False
        self.step.curves.forked()
        self.collectives.forked()
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
        """A context in which forked processes are not watched: they only try something."""
        self.hides_forks = True
        try:
            yield
        finally:
            self.hides_forks = False

    @contained("observe.child_exit")
    def child_ends(self) -> None:
        """A child of `multiprocessing` ends well: its files are not needed any more."""
        self.exiting()
        self.listener.close()
        self.signals.child_ended_well()
