"""The parent's work during the run and at its end: collect, explain, report."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec.structs import replace

from torchmedic.contained import contained, fault_line, on_fault
from torchmedic.detect.failures.death import signal_name
from torchmedic.diagnose.registry import is_fallback, is_hang, is_silent
from torchmedic.errors import ExitStatus, UnreadableRun
from torchmedic.records import Diagnosis, Fault, Outcome, Report
from torchmedic.records.death import Death
from torchmedic.records.plain_text import visible
from torchmedic.records.recovery import Recovery, Refusal, summary
from torchmedic.report.formats import Emitter
from torchmedic.runfolder import events, files, questions
from torchmedic.runfolder.confidential import shown_fault
from torchmedic.settings import Settings
from torchmedic.supervise import deaths, job, memory_warnings, ranks
from torchmedic.supervise.child.signals import shell_status
from torchmedic.supervise.child.stderr_file import TICK_SECONDS
from torchmedic.supervise.findings import MODELS_DIFFER, Findings
from torchmedic.supervise.host.watch import HostWatch
from torchmedic.supervise.rank_exits import with_exit
from torchmedic.supervise.rank_facts import RankComparison
from torchmedic.supervise.stall.response import Response

# Gloo ends a process by an abort when the tensors of two ranks do not fit.
_MAY_BE_OF_JOB = ("abort", MODELS_DIFFER)


class Supervisor:
    """The parent's side of one run. `work` is the folder in which its processes work (default: the run folder).

    `speaking` is entered around every message while the child runs, so that it comes after the child's own output.
    """

    def __init__(
        self,
        run: Path,
        settings: Settings,
        rank: int | None = None,
        speaking: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        *,
        work: Path | None = None,
    ) -> None:
        self._run = work = work or run
        self._rank = rank
        self._speaking = speaking
        self._emitter = Emitter(run, settings)
        self._settings = settings
        self._findings = Findings(work, rank)
        self._ledger = job.Ledger(work, rank, run, settings.confidential)
        self._diagnoses: list[Diagnosis] = []
        self._told: set[object] = set()  # findings of the processes
        self._host = HostWatch(work, rank)
        self._compared = RankComparison(work)
        self._stalls = Response(work, rank, settings, self._add, self._amend, self._say)
        self._outcome = Outcome()
        self._due = 0.0
        self._fault: Fault | None = None
        self._unwritten: OSError | None = None  # why the last report could not be written
        on_fault(self.note_fault, str(work))

    def watch(self, pid: int) -> float:
        """Look at the run, and return the seconds until the next look: one or two in a healthy run."""
        now = time.monotonic()
        if now >= self._due:
            self._watch()
            self._watch_progress(pid)
            calm = self._stalls.is_calm
            self._due = now + (min(self._host.pause, self._stalls.patience) if calm else TICK_SECONDS)
        return max(0.0, self._due - time.monotonic())

    @contained("supervise.stall")
    def _watch_progress(self, pid: int) -> None:
        self._stalls.look(pid, self._host)

    @contained("supervise.watch")
    def _watch(self) -> None:
        self._host.look()
        for diagnosis in self._findings.new():
            self._add_found(diagnosis)
        for diagnosis in memory_warnings.new(self._host.guard):
            self._add(diagnosis)
        self._compare_ranks()

    @contained("supervise.rank_facts")
    def _compare_ranks(self, *, at_end: bool = False) -> None:
        for diagnosis in self._compared.new(at_end=at_end):
            self._add(diagnosis)

    def _add_found(self, diagnosis: Diagnosis) -> None:
        """Add what a process found. Several children that do the same fail in the same way, and it is told once."""
        known = (job.same_finding(diagnosis), diagnosis.rank, diagnosis.severity)
        if known not in self._told:
            self._told.add(known)
            self._add(diagnosis)

    def _add(self, diagnosis: Diagnosis) -> None:
        if diagnosis.code in self._settings.ignore and is_silent(diagnosis):  # a user may know better about these only
            return
        self._diagnoses = memory_warnings.folded(self._diagnoses, diagnosis)
        diagnosis = self._diagnoses[-1]
        said = self._write() | {job.same_finding(each) for each in self._diagnoses[:-1] if each.rank != diagnosis.rank}
        if job.same_finding(diagnosis) not in said:
            with self._speaking():
                self._emitter.say(self._ledger.shown(diagnosis))

    def _amend(self, before: Diagnosis, after: Diagnosis | None) -> None:
        self._diagnoses = [
            found for each in self._diagnoses if (found := after if each == before else each) is not None
        ]
        self._write()

    def _say(self, line: str) -> None:
        with self._speaking():
            sys.stderr.write(f"torchmedic: {visible(line)}\n")
            sys.stderr.flush()

    def _write(self) -> frozenset[object]:
        # A full disk must not keep a diagnosis off the screen.
        said: frozenset[object] = frozenset()
        try:
            said = self._ledger.publish(Report(outcome=self._outcome, diagnoses=tuple(self._diagnoses)))
            self._unwritten = None
        except OSError as error:
            self._unwritten = error
        if self._diagnoses or (self._ledger.run / files.HTML).exists():
            self._write_page()
        return said

    @contained("report.html")
    def _write_page(self) -> None:
        from torchmedic.report.html import page

        with contextlib.suppress(OSError, UnreadableRun):  # as above: the disk is full
            page.write(self._ledger.run)

    def conclude(
        self, pid: int, status: int, *, through_shell: bool, alone: bool = False, unasked: bool = False
    ) -> int:
        """Explain what is still open after the child's end, close the report, and return the exit status.

        `alone`: a signal ended the child, and torchmedic did not get this signal. `unasked`: it got no signal at all.
        """
        self._close(pid, status, through_shell, alone, unasked)
        self._say_recoveries()
        with contextlib.suppress(Exception):
            self._say_faults()
        return self._with_findings(shell_status(status))

    @contained("supervise.recoveries")
    def _say_recoveries(self) -> None:
        """Tell what kept the run alive, and how to do without it."""
        if self._settings.recover == "off":
            return
        done: list[Recovery] = []
        refused: list[Refusal] = []
        for folder in self._findings.folders():
            done += events.events_of(folder, "recovery", Recovery)
            refused += events.events_of(folder, "recovery-refused", Refusal)
        if self._settings.confidential:
            refused = [replace(each, reason=each.reason.partition(":")[0]) for each in refused]
        for line in summary(done, refused):
            sys.stderr.write(f"torchmedic: {visible(line)}\n")

    @contained("supervise.conclude")
    def _close(self, pid: int, status: int, through_shell: bool, alone: bool, unasked: bool) -> None:
        self._host.last_look()
        contained("supervise.stall")(self._stalls.last_look)()
        for folder in self._findings.folders():
            files.release(folder)
        left = deaths.read_traces(self._run, self._findings.folders())
        self._outcome = Outcome(
            exit_status=shell_status(status),
            signal=signal_name(status) if status < 0 else None,
            steps=max((box.last.updates for box in left.boxes.values() if box.last is not None), default=0),
        )
        for diagnosis in self._findings.new(at_end=True):
            self._add_found(diagnosis)
        dead = []
        if not self._stalls.killed:
            # Whoever ends one rank of a job, and not its launcher, leaves the others without it.
            requested = not alone or self._rank is None or ranks.is_explained(self._run, self._rank)
            dead = deaths.find(left, self._host, pid, status, through_shell=through_shell, requested=requested)
        if status != 0:  # with status 0, the run recovered from whatever was raised or died
            roots = self._findings.roots([self._explained(death) for death in dead])
            if self._stalls.killed and self._has_told_hang():  # an exception that the run went on after led to the hang
                roots = [found for found in roots if not is_fallback(found)]
            exited = {number for number, ended in {**self._host.ended, pid: status}.items() if ended >= 0}
            is_own_end = unasked and not left.raised  # neither a request, nor what an exception tells
            for diagnosis in roots if self._stalls.killed else self._of_job(roots, exited if is_own_end else set()):
                # The tracebacks of several ranks do not show which of them began.
                self._add_found(replace(diagnosis, in_traceback=diagnosis.in_traceback and not self._ledger.is_of_job))
            for diagnosis in memory_warnings.explained(self._findings.folders()):
                self._add(diagnosis)
        if status == 0:
            self._compare_ranks(at_end=True)
        if status == 0 and (lost := deaths.unnoticed_failure(self._findings.folders())) is not None:
            self._add_found(lost)
        self._outcome = replace(self._outcome, symptom="death" if dead else self._symptom())
        self._write()
        files.drop_empty_stacks(self._run)
        files.remove_supervisor(self._ledger.run, self._rank)
        questions.remove(self._run, over=self._rank is None)
        shown = tuple(self._ledger.shown(each) for each in self._diagnoses)
        self._emitter.finish(Report(outcome=self._outcome, diagnoses=shown))

    def _of_job(self, roots: list[Diagnosis], exited: set[int]) -> list[Diagnosis]:
        """What nobody could explain may come from ranks that went different ways: told once.

        Aborts of gloo may, and models that seem to differ: what was compared may be the values of another call.

        So may the end of a rank that has caught all exceptions. `exited` are processes that have ended by themselves.
        """
        if not (roots or exited) or not all(is_fallback(found) or found.name in _MAY_BE_OF_JOB for found in roots):
            return roots
        own = [found for found in roots if is_fallback(found) and not ranks.is_raised_in_call(self._run, found)]
        found = ranks.last_verdict(self._run, exited) if not own else None
        if found is None:
            return [with_exit(self._run, each) for each in own or roots]
        told = any(job.same_finding(each) == job.same_finding(found) for each in self._diagnoses)
        return [found] if ranks.claim(self._run) and not told else []

    def _explained(self, death: Death) -> Diagnosis:
        from torchmedic.diagnose import registry
        from torchmedic.diagnose.engine import diagnose

        if self._rank is not None:
            death = replace(death, rank=self._rank)  # a process that died before it had a folder is of this rank, too
        return diagnose(death, registry.DEATHS)

    def _has_told_hang(self) -> bool:
        return any(is_hang(found) and found.severity == "error" for found in self._diagnoses)

    def _symptom(self) -> str | None:
        if self._has_told_hang():
            return "hang"
        symptoms = (events.read_symptom(folder) for folder in self._findings.folders())
        return next((found for found in symptoms if found is not None), None)

    def _with_findings(self, status: int) -> int:
        """The exit status under `--fail-on`: 3 if there is such a finding and the script itself succeeded."""
        failing = {"never": set(), "warning": {"error", "warning"}, "error": {"error"}}[self._settings.fail_on]
        if status == 0 and any(diagnosis.severity in failing for diagnosis in self._diagnoses):
            return ExitStatus.FINDINGS
        return status

    def note_fault(self, fault: Fault) -> None:
        self._fault = self._fault or fault

    def _say_faults(self) -> None:
        """Print one contained fault, of whichever process."""
        faults: list[tuple[Fault, Path | None]] = [
            (fault, folder) for folder in self._findings.folders() for fault in events.read_faults(folder)
        ]
        if self._fault is not None:
            faults.append((self._fault, None))
        if self._unwritten is not None:
            reason = visible(self._unwritten.strerror or str(self._unwritten))
            sys.stderr.write(f"torchmedic: no report could be written to {self._ledger.run}: {reason}\n")
            return
        if self._settings.confidential:
            faults = [(shown_fault(fault), None) for fault, _ in faults]
        for fault, folder in faults[:1]:
            sys.stderr.write(fault_line(fault, "" if folder is None else str(folder / events.EVENTS)))
