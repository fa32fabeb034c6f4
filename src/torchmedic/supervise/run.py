"""One run from start to end: start it, watch it, collect what its processes found, explain a death, report."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmedic import rundir
from torchmedic.detect.death import REQUESTED, read_stacks, signal_name
from torchmedic.errors import ExitStatus, UnreadableRun, UsageError
from torchmedic.observe import blackbox
from torchmedic.records import BoxContents, Death, Diagnosis, Outcome, Report
from torchmedic.report.emit import Emitter, confidential
from torchmedic.settings import Settings
from torchmedic.supervise import launch, outside
from torchmedic.supervise.signals import Forwarder


class Supervisor:
    """The parent's side of one run."""

    def __init__(self, run: Path, settings: Settings) -> None:
        self._run = run
        self._emitter = Emitter(run, settings)
        self._settings = settings
        self._diagnoses: list[Diagnosis] = []
        self._memory_before = outside.memory_limits()
        self._outcome = Outcome()

    def execute(self, command: Sequence[str], *, hide: bool) -> int:
        """Run the command to its end and return the exit status for a shell."""
        forwarder = Forwarder(self._collect)
        try:
            try:
                child = launch.start(command, launch.environment(self._run, hide=hide), forwarder.blocked)
            except OSError as error:
                raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None
            status = forwarder.wait(child)
        finally:
            forwarder.release()
        return self._conclude(child.pid, status)

    def _collect(self) -> None:
        """Take up what the processes of the run have found since the last look, and say it."""
        known = {(place.code, place.rank, place.step) for place in self._diagnoses}
        for folder in rundir.process_folders(self._run):
            for diagnosis in rundir.read_diagnoses(folder):
                if (diagnosis.code, diagnosis.rank, diagnosis.step) not in known:
                    self._add(diagnosis)

    def _add(self, diagnosis: Diagnosis) -> None:
        if self._settings.confidential:
            diagnosis = confidential(diagnosis)
        self._diagnoses.append(diagnosis)
        self._emitter.say(diagnosis)
        self._write()

    def _write(self) -> None:
        # A full disk must not hide what is already on the screen.
        with contextlib.suppress(OSError):
            rundir.write_report(self._run, Report(outcome=self._outcome, diagnoses=tuple(self._diagnoses)))

    def _conclude(self, pid: int, status: int) -> int:
        self._outcome = Outcome(exit_status=status if status >= 0 else 128 - status, signal=signal_name(status))
        self._collect()
        boxes = self._boxes()
        for death in self._deaths(pid, status, boxes):
            self._explain(death)
        self._outcome = Outcome(
            exit_status=self._outcome.exit_status,
            signal=signal_name(status) if status < 0 else None,
            steps=max((box.last.updates for box in boxes.values() if box.last is not None), default=0),
            symptom=self._symptom(status),
        )
        self._write()
        self._say_faults()
        self._emitter.finish(Report(outcome=self._outcome, diagnoses=tuple(self._diagnoses)))
        return self._outcome.exit_status or 0

    def _boxes(self) -> dict[Path, BoxContents]:
        boxes = {}
        for folder in rundir.process_folders(self._run):
            with contextlib.suppress(UnreadableRun):
                boxes[folder] = blackbox.read(folder / rundir.BLACK_BOX)
        return boxes

    def _deaths(self, pid: int, status: int, boxes: dict[Path, BoxContents]) -> list[Death]:
        """Processes of the run that a signal ended and that had imported torch."""
        if not boxes:
            return []  # nothing of ours to explain: torch was never imported
        name = signal_name(status)
        if name is None or name in REQUESTED:
            return []
        after = outside.memory_limits()
        kills = None
        if after.oom_kills is not None and self._memory_before.oom_kills is not None:
            kills = after.oom_kills - self._memory_before.oom_kills
        ram, swap = outside.host_memory()
        deaths = []
        for folder, box in boxes.items():
            if box.clean_exit or (status < 0 and box.pid != pid) or rundir.read_diagnoses(folder):
                continue
            fatal, threads = read_stacks(self._run / rundir.STACKS / f"{box.pid}.txt")
            deaths.append(
                Death(
                    pid=box.pid,
                    rank=rundir.rank_of(folder),
                    signal=name,
                    exit_status=self._outcome.exit_status,
                    box=box,
                    threads=threads,
                    fatal_line=fatal,
                    oom_kills=kills,
                    kernel_lines=outside.kernel_log(box.pid) if name == "SIGKILL" else (),
                    memory_limit=after.limit,
                    peak_rss=outside.peak_rss_of_children(),
                    host_memory=ram,
                    swap_free=swap,
                    shm_free=outside.shm_free(),
                    core_pattern=outside.core_pattern(),
                )
            )
        return deaths

    def _explain(self, death: Death) -> None:
        from torchmedic.diagnose import registry
        from torchmedic.diagnose.engine import diagnose

        self._add(diagnose(death, registry.DEATHS))

    def raised_status(self, status: int) -> int:
        """`--fail-on` turns a finding into exit status 3 where the script itself ended well."""
        failing = {"never": set(), "warning": {"error", "warning"}, "error": {"error"}}[self._settings.fail_on]
        if status == 0 and any(diagnosis.severity in failing for diagnosis in self._diagnoses):
            return ExitStatus.FINDINGS
        return status

    def _symptom(self, status: int) -> str | None:
        for folder in rundir.process_folders(self._run):
            found = rundir.read_symptom(folder)
            if found is not None:
                return found
        name = signal_name(status)
        if status < 0 and name not in REQUESTED and self._diagnoses:
            return "death"
        return None

    def _say_faults(self) -> None:
        for folder in rundir.process_folders(self._run):
            for fault in rundir.read_faults(folder):
                sys.stderr.write(
                    f"torchmedic: a fault of its own in {fault.where} was contained, the run was not affected "
                    f"({fault.error}; details in {folder / rundir.EVENTS})\n"
                )
                return


def run(command: Sequence[str], settings: Settings, *, name: str, hide: bool) -> int:
    """Run a command under supervision; the exit status is the command's own unless `--fail-on` raises it."""
    folder = rundir.create(settings.output, name, Path(os.getcwd()))
    supervisor = Supervisor(folder, settings)
    status = supervisor.execute(command, hide=hide)
    return supervisor.raised_status(status)
