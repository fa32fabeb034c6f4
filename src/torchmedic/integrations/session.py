"""Watches parts of a process that torchmedic did not start: a block, a notebook cell, a test, a call of `fit`.

There is one session per process, with one run folder and one `report.json`, as `torchmedic run` writes them. Between
two parts torch is as it was. What only a parent process can see is missing: hangs, signals that kill the process, and
the differences between the ranks of a job.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchmedic.contained import contained, fault_line, on_fault
from torchmedic.diagnose.registry import is_silent
from torchmedic.errors import UnreadableRun
from torchmedic.integrations.telling import TellingConductor
from torchmedic.observe import lifecycle
from torchmedic.observe.failures import exceptions
from torchmedic.observe.failures.hostile_exceptions import set_traceback, traceback_of
from torchmedic.observe.failures.shown_tracebacks import with_callers, without_our_frames
from torchmedic.records import Diagnosis, Fault, Outcome, Report
from torchmedic.records.plain_text import visible
from torchmedic.report.formats import Emitter
from torchmedic.runfolder import events, files
from torchmedic.runfolder.confidential import in_use, shown_fault
from torchmedic.settings import Settings, job_identity, load, rank, working_folder
from torchmedic.supervise.findings import Findings
from torchmedic.supervise.job import Ledger, same_finding
from torchmedic.supervise.run import Folders, new_run_folder

if TYPE_CHECKING:
    from torchmedic.observe.agent import Agent


_session: Session | None = None
_has_no_folder = False  # no run folder could be made, and the user has been told


def session(settings: Settings, name: str, output: str | None = None) -> Session | None:
    """The session of this process. Another `output` or other settings begin a new one, with its own run folder.

    Args:
        settings: As for `torchmedic run`.
        name: A name for the run folder.
        output: The run folder; None for a new one in the default place, or for the one of the present session.

    Returns:
        None in a process that is watched already by a parent process, and where no run folder can be written.

    Raises:
        UsageError: The output folder is not empty, or cannot be made.
    """
    global _session, _has_no_folder
    known = _session
    if known is not None and os.getpid() == known.pid and known.is_same(settings, output):
        return known
    if _has_no_folder or (lifecycle.current() is not None and (known is None or not known.is_active)):
        return None
    job = job_identity(os.environ)
    number = rank() if job else None
    folders = new_run_folder(settings, "run" if settings.confidential else name, job, output, number)
    if folders is None:
        _has_no_folder = True
        return None
    _session = Session(settings, folders, output, number)
    return _session


def session_of_tool(name: str) -> Session | None:
    """The session of this process for a framework: the settings come from pyproject.toml and the environment."""
    return session(load({}, folder=working_folder()), name)


class Session:
    """All watched parts of this process. A part inside of another part belongs to that part."""

    def __init__(self, settings: Settings, folders: Folders, output: str | None, number: int | None) -> None:
        self.pid = os.getpid()
        self.run = folders.run
        self.diagnoses: list[Diagnosis] = []
        self.of_part: list[Diagnosis] = []  # those of the part under way, or of the last one
        # How a diagnosis is shown, and what is changed in it before: tools replace both.
        self.say: Callable[[Diagnosis], None] = Emitter(folders.run, settings).say
        self.present: Callable[[Diagnosis], Diagnosis] = _unchanged
        self._settings = settings
        self._work = folders.work
        self._output = output
        self._rank = number
        self._findings = Findings(folders.work, number)
        self._ledger = Ledger(folders.work, number, folders.run, settings.confidential)
        self._depth = 0
        self._agent: Agent | None = None
        self._folder: Path | None = None  # of this process
        self._sites: set[object] = set()  # places in the code that have begun a part
        self._resting: tuple[object, Agent] | None = None  # the last such place, and its agent between two brief parts
        self._told: set[object] = set()  # findings since the last part that was not brief
        self._site: object = None
        self._is_brief = False
        self._explained = 0  # the identity of the exception that is on its way out of the parts
        self._failed = False
        self._steps = 0  # of all parts that are over
        self._steps_of_site = 0  # of the last place, which counts on in brief parts
        self._is_written = False  # there is a report.json
        self._faults: list[Fault] = []  # contained ones, of the session itself
        self._complained = False
        self._in_use = contextlib.ExitStack()
        self._in_use.enter_context(in_use(folders.work))
        files.drop_empty_stacks(folders.work)  # nobody writes stacks without a parent process
        atexit.register(self._close)

    @property
    def is_active(self) -> bool:
        return self._depth > 0

    def is_same(self, settings: Settings, output: str | None) -> bool:
        return self.is_active or (settings == self._settings and output in (None, self._output))

    def begin(self, site: object = None) -> None:
        """Begin a part.

        Args:
            site: The place in the code that begins it. If a place begins a part again and again, such as a function for
                one training step, the later parts are watched for exceptions and bad numbers only.
        """
        if os.getpid() != self.pid:
            return  # a forked child
        self._depth += 1
        if self._depth == 1:
            on_fault(self._faults.append, str(self._work))
            self._begin(site)

    @contained("session.begin")
    def _begin(self, site: object) -> None:
        self._is_brief = site is not None and site in self._sites
        self._sites.add(site)
        self._explained, self._failed, self.of_part = 0, False, []
        resting, self._resting = self._resting, None
        if resting is not None:
            if resting[0] is site:
                self._agent = resting[1]
                lifecycle.resume(self._agent)
                return
            resting[1].close()
        if not self._is_brief or site is not self._site:
            self._steps_of_site = 0
        if not self._is_brief:
            self._told.clear()
        self._site = site
        self._agent = lifecycle.enter(
            *(self._work, lambda process: TellingConductor(process, self.look), self._folder),
            steps=self._steps_of_site,
            brief=self._is_brief,
        )

    @contained("session.failed")
    def failed(self, error: BaseException) -> None:
        """Explain an exception that leaves a part, while its frames are alive."""
        if os.getpid() != self.pid or self._agent is None or self._explained == id(error):
            return
        self._explained = id(error)
        self._failed = isinstance(error, Exception)
        without_our_frames(error)
        shown = traceback_of(error)
        set_traceback(error, with_callers(shown))
        try:
            without_our_frames(error)
            exceptions.look_at(error, self._agent.raised)
        finally:
            set_traceback(error, shown)
        self.look(at_end=True)

    def end(self) -> None:
        """End a part, and publish what is known of it."""
        if os.getpid() != self.pid or not self._depth:
            return
        self._depth -= 1
        if self._depth == 0:
            agent, self._agent = self._agent, None
            if agent is not None:
                self._conclude(agent)
            lifecycle.leave()
            on_fault(self._faults.append, str(self._work))
            if agent is not None:
                self._publish(agent)
            on_fault(None)
            self._complain()
            if self._failed:
                del agent
                gc.collect()  # what was examined has references to the frames, and so to the user's tensors

    @contained("session.conclude")
    def _conclude(self, agent: Agent) -> None:
        """Judge what is still open, while the part is watched."""
        if not self._failed and not self._is_brief:
            agent.exiting()
        if self._failed or not self._is_brief:
            self.look(at_end=True)
        steps = agent.clock.updates
        self._steps += steps - self._steps_of_site
        self._steps_of_site = steps

    @contained("session.publish")
    def _publish(self, agent: Agent) -> None:
        self._folder = agent.claimed or self._folder
        if self._is_brief and not self._failed:
            self._resting = (self._site, agent)
            return
        agent.close()
        if self._failed or agent.claimed is not None or not self._is_written:
            self._write()

    def _close(self) -> None:
        """End at the exit of the process the part that nobody has ended."""
        if self._depth:
            self._depth = 1
            folder = self._agent.claimed if self._agent is not None else None
            self._failed = self._failed or (folder is not None and events.read_symptom(folder) is not None)
            self.end()
        if os.getpid() == self.pid:
            if self._resting is not None:
                contained("session.publish")(self._write)()  # the steps of all brief parts
            files.remove_supervisor(self.run, self._rank)
            self._in_use.close()

    @contained("session.look")
    def look(self, *, at_end: bool = False) -> None:
        """Tell what the processes of the run have found since the last look."""
        if os.getpid() != self.pid:
            return  # a forked child: its findings are told here when the parent looks
        for diagnosis in self._findings.new(at_end=at_end):
            self._tell(diagnosis)
        for diagnosis in self._findings.unjudged() if at_end else ():
            self._tell(diagnosis)

    def _tell(self, diagnosis: Diagnosis) -> None:
        key = (same_finding(diagnosis), diagnosis.severity)
        if key in self._told or (diagnosis.code in self._settings.ignore and is_silent(diagnosis)):
            return
        self._told.add(key)
        diagnosis = self.present(diagnosis)
        if diagnosis not in self.diagnoses:
            self.diagnoses.append(diagnosis)
        self.of_part.append(diagnosis)
        if same_finding(diagnosis) in self._write():
            return  # another rank has told it
        self.say(self._ledger.shown(diagnosis))
        if not self._settings.confidential:
            from torchmedic.integrations import trackers

            trackers.tell(diagnosis)

    def _write(self) -> frozenset[object]:
        """Write `report.json`, and return the findings of other ranks. A full disk is no reason to say nothing."""
        under_way = self._agent.clock.updates - self._steps_of_site if self._agent is not None else 0
        outcome = Outcome(
            exit_status=None if self._depth else int(self._failed),
            steps=self._steps + under_way,
            symptom=events.read_symptom(self._folder) if self._folder is not None and self.diagnoses else None,
        )
        found: frozenset[object] = frozenset()
        try:
            found = self._ledger.publish(Report(outcome=outcome, diagnoses=tuple(self.diagnoses)))
            self._is_written = True
        except OSError as error:
            self._say_once(f"torchmedic: no report could be written to {self.run}: {visible(str(error.strerror))}\n")
        if self.diagnoses:
            self._write_page()
        return found

    @contained("report.html")
    def _write_page(self) -> None:
        from torchmedic.report.html import page

        with contextlib.suppress(OSError, UnreadableRun):
            page.write(self.run)

    def _complain(self) -> None:
        """Print one contained fault per process, as `torchmedic run` does."""
        if self._complained:
            return
        of_agent = events.read_faults(self._folder) if self._folder is not None and not self._is_brief else []
        for fault in [*self._faults, *of_agent][:1]:
            self._say_once(fault_line(shown_fault(fault) if self._settings.confidential else fault))

    def _say_once(self, line: str) -> None:
        if not self._complained:
            self._complained = True
            sys.stderr.write(visible(line))


def _unchanged(diagnosis: Diagnosis) -> Diagnosis:
    return diagnosis
