"""An exception that ended the work -> the incident to explain."""

from __future__ import annotations

import errno
from typing import Any

import msgspec

from torchmedic.detect.failures.exhaustion import Exhaustion, exhaustion_of_error
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.failures.worker_failures import failure_of
from torchmedic.observe.step.items import as_tuple
from torchmedic.observe.step.tensors import tensors_in_frames
from torchmedic.records import Phase, WorkerFailure
from torchmedic.source.segment.cut import CannotCut


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that ended the training, with what the clock and the batches knew at that moment."""

    error: BaseException
    symptom: str
    step: int
    phase: Phase
    rank: int
    batch_indices: tuple[Any, ...] = ()
    batch: tuple[Any, ...] = ()
    worker: WorkerFailure | None = None
    exhaustion: Exhaustion | None = None  # what the exception says about memory
    agent: ProcessContext | None = None  # the training process; None in a DataLoader worker
    time: float = 0.0  # in seconds since the epoch; 0 if not known

    @property
    def process(self) -> ProcessContext:
        """The training process. Raises CannotCut if there is none, so that nothing can be replayed."""
        if self.agent is None:
            raise CannotCut("a DataLoader worker runs no training step")
        return self.agent

    def with_error(self, error: BaseException) -> Raised:
        """The incident with the exception that a replay of its step raised."""
        return msgspec.structs.replace(self, error=error, exhaustion=exhaustion_of_error(error))


def symptom_of(error: BaseException, exhaustion: Exhaustion | None) -> str:
    """The kind of failure as a user would name it; `outcome.symptom` in the report."""
    if exhaustion is not None:
        return "out-of-memory"
    names = frozenset(kind.__name__ for kind in type(error).__mro__)
    if "AcceleratorError" in names or "CUDA error" in str(error):
        return "cuda-error"
    if isinstance(error, RecursionError):
        return "recursion"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "disk-full"
    return "exception"


def _tensors_at(error: BaseException) -> list[Any]:
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tensors_in_frames(tb.tb_frame) if tb is not None else []


def raised(error: BaseException, agent: ProcessContext) -> Raised:
    """Take the incident from the agent of this process."""
    agent.batches.settle(_tensors_at(error))
    worker = failure_of(error)
    exhaustion = exhaustion_of_error(error)
    explained_in_worker = worker is not None and worker.diagnosis is not None
    return Raised(
        error=error,
        symptom="out-of-memory" if explained_in_worker else symptom_of(error, exhaustion),
        step=agent.clock.step,
        phase=agent.clock.phase_name,
        rank=agent.rank,
        batch_indices=as_tuple(agent.batches.indices),
        batch=tuple(agent.batches.tensors()),
        worker=worker,
        exhaustion=exhaustion,
        agent=agent,
        time=agent.raised_at,
    )
