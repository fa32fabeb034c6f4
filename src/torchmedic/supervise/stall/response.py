"""What is said and done about a run that stands still."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from torchmedic.records import Diagnosis
from torchmedic.records.stall import Stall
from torchmedic.runfolder import questions
from torchmedic.settings import Settings
from torchmedic.supervise.host.watch import Vigil
from torchmedic.supervise.proc import tree
from torchmedic.supervise.stall.watch import Case, StallWatch

_SAVING = 300.0  # seconds that the weights may take to be written

Tell = Callable[[Diagnosis], None]


class Response:
    """Asks the rules, tells the user, and does what the user wants done.

    `tell` adds a diagnosis, `amend` puts another (or none) in the place of one, `say` is a line on stderr.
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
        self._wants = settings.on_stall
        self._watch = StallWatch(run, rank, settings.stall_after)
        self._tell = tell
        self._amend = amend
        self._say = say
        self._saving: dict[int, float] = {}  # processes that were asked to, and until when they may take
        self.killed = False  # the run, by us

    def look(self, root: int, vigil: Vigil) -> None:
        """`root` is the process that was started."""
        for case, stall in self._watch.look(vigil):
            if not self.killed:
                self._judge(case, stall, root)
        for diagnosis, seconds in self._watch.resumed():
            self._went_on(diagnosis, seconds)
        self._look_at_saving()

    def last_look(self) -> None:
        """The run is over, by itself or not."""
        if not self.killed:
            self._watch.last_look()
            for diagnosis, seconds in self._watch.resumed():
                self._went_on(diagnosis, seconds)
        self._look_at_saving()

    def _judge(self, case: Case, stall: Stall, root: int) -> None:
        from torchmedic.diagnose import registry
        from torchmedic.diagnose.engine import ask

        diagnosis = ask(stall, registry.STALLED)
        if diagnosis is None or (diagnosis.code, diagnosis.severity) in case.noted:
            return  # it moves, and nothing is wrong with that
        if diagnosis.severity == "note" and any(severity != "note" for _, severity in case.noted):
            return  # one case, one diagnosis: it is slow for a reason that has been told
        case.noted.add((diagnosis.code, diagnosis.severity))
        if diagnosis.severity == "note":
            case.notes.append(diagnosis)
        while diagnosis.severity != "note" and case.notes:
            self._amend(case.notes.pop(), None)  # what was thought before is superseded
        self._tell(diagnosis)
        if diagnosis.severity != "error":
            return
        case.said = diagnosis
        if self._wants == "kill":
            self._kill(root)
        elif self._wants == "checkpoint" and questions.ask(self._run, stall.pid, questions.SAVE):
            self._saving[stall.pid] = time.monotonic() + _SAVING

    def _went_on(self, diagnosis: Diagnosis, seconds: float) -> None:
        again = msgspec.structs.replace(
            diagnosis, severity="warning", evidence=(*diagnosis.evidence, f"it went on by itself after {seconds:.0f} s")
        )
        self._amend(diagnosis, again)
        self._say(f"the run went on after {seconds:.0f} s ({diagnosis.code})")

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
