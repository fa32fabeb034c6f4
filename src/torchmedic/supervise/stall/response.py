"""The response to a run that makes no progress: the diagnosis, and what `--on-stall` asks for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from torchmedic.diagnose.registry import is_silent
from torchmedic.records import Diagnosis
from torchmedic.records.stall import Stall
from torchmedic.runfolder import files, questions
from torchmedic.runfolder.stall import write_stall
from torchmedic.settings import Settings
from torchmedic.supervise import ranks
from torchmedic.supervise.host.watch import HostWatch
from torchmedic.supervise.proc import tree
from torchmedic.supervise.stall.examination import EXAMINATION_SECONDS
from torchmedic.supervise.stall.watch import Case, StallWatch

_MAX_SAVING_SECONDS = 300.0  # for writing the weights
_PAUSE_SECONDS = 1.5  # between examinations of a rank that waits for another, which may be explained soon

_WAITS_FOR_RANKS = "waits-for-collective"
_NOT_EXPLAINED = "standstill-not-explained"

Tell = Callable[[Diagnosis], None]


class Response:
    """Asks the rules, informs the user, and does what `--on-stall` asks for.

    `tell` adds a diagnosis, `amend` replaces or removes a diagnosis, `say` prints a line to stderr.
    """

    def __init__(
        self,
        run: Path,
        rank: int | None,
        settings: Settings,
        tell: Tell,
        amend: Callable[[Diagnosis, Diagnosis | None], None],
        say: Callable[[str], None],
    ) -> None:
        self._run = run
        self._rank = rank
        self._wants = settings.on_stall
        self._watch = StallWatch(run, rank, settings.stall_after)
        self._tell = tell
        self._amend = amend
        self._say = say
        self._saving: dict[int, float] = {}  # by process that was asked to save: the deadline
        self._explained = False  # an error of some process was told
        self._job: Diagnosis | None = None  # the diagnosis of all ranks
        self.killed = False  # torchmedic has killed the run

    def look(self, root: int, host: HostWatch) -> None:
        """Called at every tick. `root` is the process that torchmedic started."""
        for case, stall in self._watch.look(host):
            if not self.killed:
                self._judge(case, stall, root)
        for diagnosis, seconds in self._watch.resumed():
            self._resumed(diagnosis, seconds)
        self._look_at_saving()

    @property
    def is_calm(self) -> bool:
        """Whether nothing is examined or saved, and a look before `patience` has passed is needed by nobody."""
        return self._watch.is_calm and not self._saving

    @property
    def patience(self) -> float:
        """Seconds until a process that makes progress now can have stalled, a second at least."""
        return self._watch.patience

    def last_look(self) -> None:
        """Called once after the end of the run."""
        if not self.killed:
            self._watch.last_look()
            for diagnosis, seconds in self._watch.resumed():
                self._resumed(diagnosis, seconds)
        self._look_at_saving()

    def _judge(self, case: Case, stall: Stall, root: int) -> None:
        from torchmedic.diagnose import registry
        from torchmedic.diagnose.engine import ask

        diagnosis = ask(stall, registry.STALLED)
        is_hung = diagnosis is not None and diagnosis.severity == "error"
        waits = diagnosis is not None and self._may_wait_for_ranks(diagnosis)
        if diagnosis is not None and (is_hung or waits):
            of_job = ranks.verdict(self._run, still=stall.still, only_met=not (is_hung and waits))
            if of_job is None and is_hung and waits:
                if self._explained or ranks.is_explained(self._run, stall.rank):
                    return
                left = ranks.seconds_to_explain(self._run, stall.rank, stall.still, stall.limit)
                if left:
                    case.next = stall.still + min(max(left - EXAMINATION_SECONDS, 0.0), _PAUSE_SECONDS)
                    return  # a rank that stands elsewhere is the cause, and is examined itself
            if of_job is not None or (is_hung and waits):
                diagnosis = of_job or diagnosis
                if self._job is not None or not ranks.claim(self._run):
                    if self._wants == "kill":
                        self._kill(root)
                    return  # told for the job, here or by the parent of another rank
                self._job = diagnosis
        if diagnosis is None or (diagnosis.code, diagnosis.severity) in case.noted:
            return  # it makes progress, or the diagnosis is known
        if diagnosis.severity == "note" and any(severity != "note" for _, severity in case.noted):
            return  # one diagnosis per case: the reason was already reported
        if diagnosis.severity == "error" and diagnosis != self._job and self._is_told_by_others(stall.rank):
            if self._wants == "kill":
                self._kill(root)
            return  # a rank that hangs at its end because another has failed
        case.noted.add((diagnosis.code, diagnosis.severity))
        if diagnosis.severity == "note":
            case.notes.append(diagnosis)
        while diagnosis.severity != "note" and case.notes:
            self._amend(case.notes.pop(), None)  # superseded
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeError):
            write_stall(self._run, stall, self._rank)
        self._tell(diagnosis)
        if diagnosis.severity != "error":
            return
        case.said = diagnosis
        self._explained = True
        if self._wants == "kill":
            self._kill(root)
        elif self._wants == "checkpoint" and questions.ask(self._run, stall.pid, questions.SAVE):
            self._saving[stall.pid] = time.monotonic() + _MAX_SAVING_SECONDS

    def _may_wait_for_ranks(self, diagnosis: Diagnosis) -> bool:
        """Whether the process waits for ranks, or for something not known: the logs of all ranks may tell more.

        About any other hang they tell more only where the ranks have met in calls that do not fit.
        """
        if diagnosis.name == _WAITS_FOR_RANKS:
            return True
        return diagnosis.name == _NOT_EXPLAINED and ranks.read_job(self._run) is not None

    def _is_told_by_others(self, rank: int) -> bool:
        """Whether the parent of another rank has told a cause, and not only that its rank waits."""
        told = files.errors_of_others(self._run, rank) if self._rank is not None else []
        return any(not is_silent(each) and each.name not in (_WAITS_FOR_RANKS, _NOT_EXPLAINED) for each in told)

    def _resumed(self, diagnosis: Diagnosis, seconds: float) -> None:
        if diagnosis == self._job:
            if ranks.is_broken(self._run):
                return  # a rank is gone, and the others woke up only to fail
            self._job = None
            ranks.give_back(self._run)
        again = msgspec.structs.replace(
            diagnosis,
            severity="warning",
            evidence=(*diagnosis.evidence, f"the run resumed by itself after {seconds:.0f} s"),
        )
        self._amend(diagnosis, again)
        self._say(f"the run resumed after {seconds:.0f} s ({diagnosis.code})")

    def _kill(self, root: int) -> None:
        self.killed = True
        self._say("killed, as --on-stall kill asks for")
        with contextlib.suppress(OSError):
            if os.getpgid(root) == root:
                os.killpg(root, signal.SIGKILL)
        for pid in reversed(tree.pids(root)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _look_at_saving(self) -> None:
        for pid, deadline in list(self._saving.items()):
            saved = questions.read_saved(self._run, pid)
            if saved is None and time.monotonic() < deadline:
                continue
            del self._saving[pid]
            if saved is not None and saved.path:
                self._say(f"saved the weights and the optimizer to {os.path.relpath(saved.path)}")
            else:
                why = saved.refused if saved is not None else "the process did not answer"
                self._say(f"the weights were not saved: {why}")
