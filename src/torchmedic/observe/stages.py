"""The interface between the agent and the stages that explain: the agent calls it, `examine` implements it.

It is handed in when the agent is installed. The implementation loads detection, replay and diagnosis only when there
is something to judge or to explain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from torchmedic.observe.context import ReportingProcess
from torchmedic.records import Diagnosis, WorkerFailure
from torchmedic.records.numbers import NumberTrace

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from torchmedic.observe.checkup.loss_graph import LossGraph
    from torchmedic.observe.checkup.unreached_parameters import Unreached
    from torchmedic.observe.heap.growth_watch import LeakWatch
    from torchmedic.observe.heap.walk import Held
    from torchmedic.observe.loop.ledger import Habits
    from torchmedic.records.memory import HeldMemory

# What is not finite, much too large, still where it was, or below zero.
Quantity = Literal["loss", "gradient", "rate", "update", "scale", "growth", "standstill", "sunk"]
UpdateStage = Literal["backward", "step", "update"]  # backward is over, the weights will be updated, were updated


class Recording(Protocol):
    """The failing operation, to be written beside its diagnosis."""

    def write(self, folder: Path, number: int) -> None: ...


class Finding(NamedTuple):
    """A diagnosis that is not published yet, the operation behind it, and the way of the bad number.

    `hold` is called when the diagnosis is published: it keeps the failing step alive if the user wants that.
    """

    diagnosis: Diagnosis
    recording: Recording | None = None
    trace: NumberTrace | None = None
    hold: Callable[[], None] | None = None
    is_tentative: bool = False  # said only if the loss does not recover


class GrowthStages(Protocol):
    """What a process needs that only watches what grows: a DataLoader worker."""

    def examine_growth(self, watch: LeakWatch, frame: FrameType, *, min_data_bytes: int = 0) -> None:
        """Something has grown at each of the last looks: explain it if it is a leak."""

    def report_holders(self, holders: list[tuple[Held, int]]) -> None:
        """Memory is short: write down what holds it, with the lines that fill it."""


class Stages(GrowthStages, Protocol):
    """Everything that the agent calls. Nothing here may be called before there is something to judge or to explain."""

    def explain_exception(self, error: BaseException) -> None:
        """An exception has ended the work; its frames are alive."""

    def explain_nonfinite(
        self, optimizer: Optimizer | None, frame: FrameType, quantity: Quantity, stage: UpdateStage
    ) -> Finding | None:
        """A number is NaN or infinite; the frames of the step are on the stack. The finding is not published.

        Returns:
            None where the loss has only grown, and no rerun of the last steps shows why.
        """

    def publish(self, finding: Finding) -> None:
        """The bad number is about to reach the weights, or has reached them."""

    def explain_lost_device(self, error: BaseException, frame: FrameType) -> None:
        """A device was found dead before the user's own code came to notice it."""

    def explain_exit(self, frame: FrameType) -> None:
        """The script leaves by `sys.exit`, with no exception under way."""

    def check_up(self, graphs: Sequence[LossGraph], unreached: Unreached | None, frame: FrameType | None) -> None:
        """The first steps have been looked at."""

    def run_eagerly(self, frame: FrameType, context: AbstractContextManager[None]) -> Sequence[torch.Tensor]:
        """Run the step up to its backward again, without the compiler; gives what backward would be called on."""

    def prepare_loop(self) -> object:
        """Load what `examine_loop` needs; called before training begins, as it takes some milliseconds."""

    def examine_loop(self, habits: Habits) -> None:
        """The ledger of the loop has enough in it to be judged."""

    def locate_holders(self, holders: list[tuple[Held, int]]) -> list[HeldMemory]:
        """Holders of memory and their bytes, with the lines that fill them."""

    def explain_exhausted_worker(self, error: BaseException, failure: WorkerFailure) -> Diagnosis | None:
        """Called in a DataLoader worker that has run out of memory; None where nothing is certain."""

    def in_worker(self, worker: ReportingProcess) -> GrowthStages:
        """Called in a DataLoader worker: the stages that report in its name."""
