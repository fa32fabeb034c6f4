"""What the agent calls when it has noticed something: each call leads to the module that explains it.

This module is loaded in every watched process, so it imports the stages where they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchmedic.examine.publication import Said, publish_finding
from torchmedic.observe.context import ProcessContext, ReportingProcess
from torchmedic.observe.stages import Finding, Quantity, UpdateStage
from torchmedic.records import Diagnosis, WorkerFailure
from torchmedic.runfolder.confidential import is_confidential

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from torchmedic.observe.checkup.loss_graph import LossGraph
    from torchmedic.observe.checkup.unreached_parameters import Unreached
    from torchmedic.observe.heap.growth_watch import LeakWatch
    from torchmedic.observe.heap.walk import Held
    from torchmedic.observe.loop.ledger import Habits
    from torchmedic.records.memory import HeldMemory


_NEVER_CLEARED = frozenset({"TM601"})  # gradients that are added up over all steps make the updates ever larger
_OF_LARGE_UPDATES = frozenset({"TM222", "TM230"})


class GrowthConductor:
    """Explains what grows, in a training process or in a DataLoader worker."""

    def __init__(self, process: ReportingProcess, said: Said) -> None:
        self._process = process
        self._said = said

    def examine_growth(self, watch: LeakWatch, frame: FrameType, *, min_data_bytes: int = 0) -> None:
        """Explain what has grown at each of the last looks; data below `min_data_bytes` is left alone."""
        from torchmedic.detect.trends.heap_growth import growths

        grown = (each for each in growths(watch) if each.what != "data" or each.bytes_held >= min_data_bytes)
        found = [growth for growth in grown if watch.wants_to_know(growth)]
        if found:
            from torchmedic.examine.growth import explain_growth

            explain_growth(found, watch.looks, frame, self._process, self._said)

    def report_holders(self, holders: list[tuple[Held, int]]) -> None:
        if not is_confidential(self._process.run):
            from torchmedic.evidence.leaks.source.traffic import with_lines  # few imports: memory is short

            # The parent reads it, also if this process does not live to say more.
            located = with_lines(holders)
            self._process.open().events.write("holders", step=self._process.clock.step, holders=located)


class Conductor(GrowthConductor):
    """Implements `observe.stages.Stages`. Lives as long as the agent of its process."""

    def __init__(self, process: ProcessContext) -> None:
        super().__init__(process, Said())
        self._agent = process
        self._judged: set[Any] = set()  # incidents of the loop that the rules have been asked about

    def explain_exception(self, error: BaseException) -> None:
        from torchmedic.examine.exception import explain_exception

        explain_exception(error, self._agent)

    def explain_nonfinite(
        self, optimizer: Optimizer | None, frame: FrameType, quantity: Quantity, stage: UpdateStage
    ) -> Finding | None:
        from torchmedic.examine.nonfinite import explain_nonfinite
        from torchmedic.observe.device.hidden_work import unseen_by_subclasses
        from torchmedic.replay.isolation.endings import leaving_no_garbage
        from torchmedic.replay.isolation.open_files import found_once

        # What was replayed has references to the user's objects, and the run goes on.
        with unseen_by_subclasses(), leaving_no_garbage(), found_once():
            return explain_nonfinite(optimizer, frame, quantity, stage, self._agent)

    def publish(self, finding: Finding) -> None:
        diagnosis = finding.diagnosis
        if diagnosis.code in _OF_LARGE_UPDATES and self._said.has_code(_NEVER_CLEARED):
            self._agent.open().events.write("echo", code=diagnosis.code, step=diagnosis.step)
            return
        self._said.note(diagnosis)
        publish_finding(finding, self._agent)

    def explain_lost_device(self, error: BaseException, frame: FrameType) -> None:
        from torchmedic.examine.lost_device import explain_noticed_loss

        explain_noticed_loss(error, frame, self._agent)

    def explain_exit(self, frame: FrameType) -> None:
        from torchmedic.examine.nonfinite import explain_exit

        explain_exit(frame, self._agent)

    def check_up(self, graphs: Sequence[LossGraph], unreached: Unreached | None, frame: FrameType | None) -> None:
        from torchmedic.examine.silent_mistakes import explain_first_steps

        explain_first_steps(graphs, unreached, frame, self._agent, self._said)

    def run_eagerly(self, frame: FrameType, context: AbstractContextManager[None]) -> Sequence[torch.Tensor]:
        from torchmedic.examine.compiled_step import run_eagerly

        return run_eagerly(frame, context, self._agent)

    def prepare_loop(self) -> object:
        from torchmedic.detect.loop import find

        return find

    def examine_loop(self, habits: Habits) -> None:
        from torchmedic.detect.loop.find import incidents

        found = [each for each in incidents(habits) if (type(each), each.cause) not in self._judged]
        if found:
            from torchmedic.examine.silent_mistakes import explain_loop

            self._judged.update((type(each), each.cause) for each in found)
            explain_loop(found, self._agent, self._said)

    def locate_holders(self, holders: list[tuple[Held, int]]) -> list[HeldMemory]:
        from torchmedic.evidence.leaks.source.traffic import with_lines

        return with_lines(holders)

    def explain_exhausted_worker(self, error: BaseException, failure: WorkerFailure) -> Diagnosis | None:
        from torchmedic.examine.exhausted_worker import explain_in_worker

        return explain_in_worker(error, failure)

    def in_worker(self, worker: ReportingProcess) -> GrowthConductor:
        # A forked worker does not repeat what its parent has said before the fork.
        return GrowthConductor(worker, self._said)
