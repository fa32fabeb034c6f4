"""What the later stages may ask of a watched process: typed views of the agent.

`StepContext` is one training step: the step under way, or an earlier one that is replayed from what was kept of it.
`ProcessContext` is the process around it, as it is now. `ReportingProcess` is as much of a process as it takes to
write a diagnosis down; a DataLoader worker is no more than that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from torchmedic.observe.device.device_marks import DeviceMarks
    from torchmedic.observe.heap.growth_watch import LeakWatch
    from torchmedic.observe.loop.ledger import Habits
    from torchmedic.observe.numbers.finite_watch import FiniteWatch
    from torchmedic.observe.numbers.kept_steps import KeptBackwards
    from torchmedic.observe.numbers.weight_copies import Rewind
    from torchmedic.observe.step.batches import Batches
    from torchmedic.observe.step.clock import Clock
    from torchmedic.observe.step.events import Events
    from torchmedic.observe.step.step_notes import StepNotes


class Notes(Protocol):
    """The state at the start of a step, to go back to."""

    @property
    def rng(self) -> torch.Tensor | None: ...
    @property
    def device_rng(self) -> list[torch.Tensor]: ...
    @property
    def grad_enabled(self) -> bool: ...
    @property
    def autocast(self) -> dict[str, torch.dtype]: ...
    @property
    def carried(self) -> dict[str, Any]: ...
    @property
    def carried_frame(self) -> int: ...
    @property
    def sequence_number(self) -> int: ...
    @property
    def forward(self) -> dict[int, tuple[CodeType, int]]:
        """The code and the line at the forward pass of every frame, by the identity of the frame."""


class StepBatch(Protocol):
    """The batch of a step, and the dataset items it was made of."""

    @property
    def whole(self) -> Any: ...
    @property
    def indices(self) -> Any: ...
    def tensors(self) -> list[torch.Tensor]: ...


class StepContext(Protocol):
    """A training step, with its own notes and batch, in the process as it is now."""

    @property
    def run(self) -> Path: ...
    @property
    def rank(self) -> int: ...
    @property
    def notes(self) -> Notes: ...
    @property
    def batches(self) -> StepBatch: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def finite(self) -> FiniteWatch: ...
    @property
    def kept_backwards(self) -> KeptBackwards: ...
    @property
    def rewind(self) -> Rewind: ...


class StepView:
    """A `StepContext` with the notes or the batch of another step."""

    def __init__(self, agent: StepContext, *, notes: Notes | None = None, batches: StepBatch | None = None) -> None:
        self.notes = notes or agent.notes
        self.batches = batches or agent.batches
        self.run = agent.run
        self.rank = agent.rank
        self.clock = agent.clock
        self.finite = agent.finite
        self.kept_backwards = agent.kept_backwards
        self.rewind = agent.rewind


class ProcessFolder(NamedTuple):
    """The folder of a process in its run, and the events that are written there."""

    path: Path
    events: Events


class _HasStep(Protocol):
    @property
    def step(self) -> int: ...


class ReportingProcess(Protocol):
    """A process that can leave a diagnosis in the run folder."""

    @property
    def run(self) -> Path: ...
    @property
    def rank(self) -> int: ...
    @property
    def loader_worker(self) -> tuple[int, int] | None:
        """The number of this DataLoader worker and how many there are; None in any other process."""

    @property
    def clock(self) -> _HasStep: ...

    def open(self) -> ProcessFolder:
        """The folder of this process, claimed at the first call."""


class ProcessContext(StepContext, Protocol):
    """The watched process, with the step that is under way."""

    device_lost: bool  # and that has been explained
    raised_at: float  # when the exception came that ended the work, in seconds since the epoch; 0 if none did

    @property
    def loader_worker(self) -> None: ...
    @property
    def notes(self) -> StepNotes: ...
    @property
    def batches(self) -> Batches: ...
    @property
    def habits(self) -> Habits: ...
    @property
    def leaks(self) -> LeakWatch: ...
    @property
    def marks(self) -> DeviceMarks: ...

    def open(self) -> ProcessFolder:
        """The folder of this process, claimed at the first call."""

    def publish_collectives(self) -> None:
        """Write down which collectives this process has called."""

    def publish_course(self) -> None:
        """Write down how the training went so far, for the report."""

    def raised(self, error: BaseException) -> None:
        """An exception has ended the work of this process."""

    def examining(self) -> AbstractContextManager[None]:
        """A pause of the hooks that the parent is told of."""

    def hidden_forks(self) -> AbstractContextManager[None]:
        """A context in which forked processes are not watched: they only try something."""
