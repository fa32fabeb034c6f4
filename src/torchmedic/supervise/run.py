"""One run from start to end: start it, watch it, collect what its processes found, explain a death, report."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmedic import rundir
from torchmedic.contained import contained, on_fault
from torchmedic.detect.death import signal_name
from torchmedic.errors import ExitStatus, UsageError
from torchmedic.records import Death, Diagnosis, Fault, Outcome, Report
from torchmedic.report.emit import Emitter, confidential
from torchmedic.settings import Settings, rank
from torchmedic.supervise import deaths, job, launch
from torchmedic.supervise.findings import Findings
from torchmedic.supervise.signals import Forwarder
from torchmedic.supervise.vigil import Vigil


class Supervisor:
    """The parent's side of one run."""

    def __init__(self, run: Path, settings: Settings, rank: int | None = None) -> None:
        self._run = run
        self._emitter = Emitter(run, settings)
        self._settings = settings
        self._findings = Findings(run, rank)
        self._ledger = job.Ledger(run, rank)
        self._diagnoses: list[Diagnosis] = []
        self._vigil = Vigil(run)
        self._outcome = Outcome()
        self._fault: Fault | None = None
        on_fault(self._note_fault)

    def execute(self, command: Sequence[str], *, hide: bool) -> int:
        """Run the command to its end and return the exit status for a shell."""
        forwarder = Forwarder(contained("supervise.watch")(self._watch))
        try:
            try:
                child = launch.start(command, launch.environment(self._run, hide=hide), forwarder.inherited)
            except OSError as error:
                raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None
            status = forwarder.wait(child)
        finally:
            forwarder.release()
        contained("supervise.conclude")(self._conclude)(child.pid, status, forwarder.killed, not hide)
        with contextlib.suppress(Exception):
            self._say_faults()
        return self._with_findings(shell_status(status))

    def _watch(self) -> None:
        self._vigil.look()
        for diagnosis in self._findings.new():
            self._add(diagnosis)

    def _add(self, diagnosis: Diagnosis) -> None:
        if self._settings.confidential:
            diagnosis = confidential(diagnosis)
        self._diagnoses.append(diagnosis)
        said = self._write() | {job.same_finding(each) for each in self._diagnoses[:-1] if each.rank != diagnosis.rank}
        if job.same_finding(diagnosis) not in said:
            self._emitter.say(diagnosis)

    def _write(self) -> frozenset[object]:
        # A full disk must not hide what is already on the screen.
        with contextlib.suppress(OSError):
            return self._ledger.publish(Report(outcome=self._outcome, diagnoses=tuple(self._diagnoses)))
        return frozenset()

    def _conclude(self, pid: int, status: int, killed: bool, through_shell: bool) -> None:
        """The child has ended: explain what is still open, and close the report."""
        self._vigil.last_look()
        for folder in self._findings.folders():
            rundir.release(folder)
        left = deaths.read_left(self._run, self._findings.folders())
        self._outcome = Outcome(
            exit_status=shell_status(status),
            signal=signal_name(status) if status < 0 else None,
            steps=max((box.last.updates for box in left.boxes.values() if box.last is not None), default=0),
        )
        for diagnosis in self._findings.new():
            self._add(diagnosis)
        dead = [] if killed else deaths.find(left, self._vigil, pid, status, through_shell=through_shell)
        if status != 0:  # else whatever was raised or died, the run got over it
            for diagnosis in self._findings.roots([self._explained(death) for death in dead]):
                self._add(diagnosis)
        self._outcome = Outcome(
            exit_status=self._outcome.exit_status,
            signal=self._outcome.signal,
            steps=self._outcome.steps,
            symptom="death" if dead else self._symptom(),
        )
        self._write()
        rundir.drop_empty_stacks(self._run)
        self._emitter.finish(Report(outcome=self._outcome, diagnoses=tuple(self._diagnoses)))

    def _explained(self, death: Death) -> Diagnosis:
        from torchmedic.diagnose import registry
        from torchmedic.diagnose.engine import diagnose

        return diagnose(death, registry.DEATHS)

    def _symptom(self) -> str | None:
        symptoms = (rundir.read_symptom(folder) for folder in self._findings.folders())
        return next((found for found in symptoms if found is not None), None)

    def _with_findings(self, status: int) -> int:
        """`--fail-on` turns a finding into exit status 3 where the script itself ended well."""
        failing = {"never": set(), "warning": {"error", "warning"}, "error": {"error"}}[self._settings.fail_on]
        if status == 0 and any(diagnosis.severity in failing for diagnosis in self._diagnoses):
            return ExitStatus.FINDINGS
        return status

    def _note_fault(self, fault: Fault) -> None:
        self._fault = self._fault or fault

    def _say_faults(self) -> None:
        """Own up to a bug of ours, once, whichever process it was in."""
        faults: list[tuple[Fault, Path | None]] = [
            (fault, folder) for folder in self._findings.folders() for fault in rundir.read_faults(folder)
        ]
        if self._fault is not None:
            faults.append((self._fault, None))
        for fault, folder in faults[:1]:
            details = "" if folder is None else f"; details in {folder / rundir.EVENTS}"
            sys.stderr.write(
                f"torchmedic: a fault of its own in {fault.where} was contained, the run was not affected "
                f"({fault.error}{details})\n"
            )


def shell_status(status: int) -> int:
    """A wait status as a shell reports it."""
    return status if status >= 0 else 128 - status


def run(command: Sequence[str], settings: Settings, *, name: str, hide: bool) -> int:
    """Run a command under supervision; the exit status is the command's own unless `--fail-on` raises it."""
    launched = job.identity(os.environ)
    try:
        folder = rundir.create(settings.output, name, Path(os.getcwd()), launched)
        if settings.confidential:
            rundir.mark_confidential(folder)
    except OSError as error:
        sys.stderr.write(f"torchmedic: not watching, no run folder can be made: {error.strerror or error}\n")
        return _unwatched(command)
    return Supervisor(folder, settings, rank() if launched else None).execute(command, hide=hide)


def _unwatched(command: Sequence[str]) -> int:
    forwarder = Forwarder(_nothing)
    try:
        return shell_status(forwarder.wait(launch.start(command, dict(os.environ), forwarder.inherited)))
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None
    finally:
        forwarder.release()


def _nothing() -> None:
    return
