"""Tells somebody in the watched process of each new diagnosis. `torchmedic run` starts the agent from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torchmedic.contained import contained
from torchmedic.examine.conductor import Conductor
from torchmedic.observe import lifecycle
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.stages import Finding
from torchmedic.runfolder.confidential import is_confidential
from torchmedic.runfolder.files import read_diagnoses
from torchmedic.runfolder.layout import recovery_level

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph
    from torchmedic.observe.checkup.unreached_parameters import Unreached
    from torchmedic.observe.heap.growth_watch import LeakWatch
    from torchmedic.observe.loop.ledger import Habits


def install(run_dir: str) -> None:
    """Watch this process for its parent. An experiment tracker that is in use here also gets each diagnosis."""
    lifecycle.install(run_dir, lambda process: TellingConductor(process, TrackerNews(process).look))
    level = recovery_level(Path(run_dir))
    agent = lifecycle.current()
    if level is not None and agent is not None:
        from torchmedic.recovery.install import install as install_recovery

        contained("recover.install")(install_recovery)(level, agent)


class TellingConductor(Conductor):
    """Calls `look` after each step of the examination that may have written a diagnosis."""

    def __init__(self, process: ProcessContext, look: Callable[[], None]) -> None:
        super().__init__(process)
        self._look = look

    def explain_exception(self, error: BaseException) -> None:
        super().explain_exception(error)
        self._look()

    def publish(self, finding: Finding) -> None:
        super().publish(finding)
        self._look()

    def explain_lost_device(self, error: BaseException, frame: FrameType) -> None:
        super().explain_lost_device(error, frame)
        self._look()

    def explain_exit(self, frame: FrameType) -> None:
        super().explain_exit(frame)
        self._look()

    def check_up(self, graphs: Sequence[LossGraph], unreached: Unreached | None, frame: FrameType | None) -> None:
        super().check_up(graphs, unreached, frame)
        self._look()

    def examine_loop(self, habits: Habits) -> None:
        super().examine_loop(habits)
        self._look()

    def examine_growth(self, watch: LeakWatch, frame: FrameType, *, min_data_bytes: int = 0) -> None:
        super().examine_growth(watch, frame, min_data_bytes=min_data_bytes)
        self._look()


class TrackerNews:
    """Hands the diagnoses of one process to the experiment trackers that the process uses."""

    def __init__(self, process: ProcessContext) -> None:
        self._process = process
        self._seen: set[Path] = set()

    @contained("integrations.trackers")
    def look(self) -> None:
        if is_confidential(self._process.run):
            return
        new = read_diagnoses(self._process.open().path, self._seen)
        self._seen.update(new)
        if new:
            from torchmedic.integrations.trackers import tell

            for diagnosis in new.values():
                tell(diagnosis)
