"""Trials of cures for a broken graph: the step must pass, with the loss that it had."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchmedic.diagnose.cures.edits import Candidate
from torchmedic.evidence.backward_failure import BackwardFailure, StepFailure
from torchmedic.records import Safety, Treatment
from torchmedic.replay.isolation.torch_state import set_version
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.trial import Edit, Verdict, attempt, describe, passes, treatment
from torchmedic.replay.trace.microscope import storage_of

_MAX_TRIALS = 8
_MAX_KEPT_BYTES = 1 << 28


class GraphTrials:
    """Tries cures on one failing step, each from the same values.

    Args:
        failure: The failure, with its step.
        written: The storages that the step writes to itself. A replay writes to them again, so what lives there is put
            back after each trial. None for all that is in reach, up to a limit.
    """

    def __init__(self, failure: BackwardFailure | StepFailure, written: Iterable[int] | None = ()) -> None:
        self._failure = failure
        self._wanted_loss: float | None = None
        self._is_replayed = False
        storages = frozenset(written) if written is not None else None
        self._kept = [(tensor, tensor._version, tensor.detach().clone()) for tensor in _living(failure, storages)]

    def wanted_loss(self) -> float | None:
        """The loss that a cure has to keep: that of the original, or of a plain replay, which is done once."""
        if not self._is_replayed:
            self._is_replayed = True
            self._wanted_loss = self._replay_loss()
        return self._wanted_loss

    def _replay_loss(self) -> float | None:
        if isinstance(self._failure, StepFailure):
            with self._from_same_values():
                return self._failure.intended_loss()
        if self._failure.faithful and not self._kept:
            return self._failure.loss
        step = self._failure.step
        if step is None:
            return None
        with self._from_same_values():
            return step.again().loss

    def verdict(
        self,
        edit: Edit,
        *,
        same_loss: bool = True,
        keep_graphs: bool = True,
        accepts: Callable[[ReplayResult], bool] | None = None,
    ) -> Verdict:
        step = self._failure.step
        wanted = self.wanted_loss() if step is not None and same_loss else None
        if step is None or (same_loss and wanted is None):
            return Verdict(False, "", "")
        with self._from_same_values():
            return attempt(step, edit, same_loss=wanted, keep_graphs=keep_graphs, accepts=accepts)

    def first(
        self,
        candidates: Iterable[Candidate],
        *,
        same_loss: bool = True,
        keep_graphs: bool = True,
        safety: Safety = "edit",
        accepts: Callable[[ReplayResult], bool] | None = None,
    ) -> Treatment | None:
        """The first candidate that passes."""
        for title, edit in itertools.islice(candidates, _MAX_TRIALS):
            verdict = self.verdict(edit, same_loss=same_loss, keep_graphs=keep_graphs, accepts=accepts)
            if verdict.passed:
                return treatment(title, verdict, safety=safety)
        return None

    def under(self, change: Callable[[], contextlib.AbstractContextManager[Any]], title: str) -> Treatment | None:
        """A cure that is no edit of one line: the step replayed while something is changed."""
        step = self._failure.step
        if step is None:
            return None
        with self._from_same_values(), change():
            played: ReplayResult = step.again()
        if not passes(played) or played.loss != self.wanted_loss():
            return None
        return Treatment(title=title, proven=True, result=describe(played))

    @contextlib.contextmanager
    def _from_same_values(self) -> Iterator[None]:
        try:
            yield
        finally:
            for tensor, version, value in self._kept:
                # A replay sets the versions of weights back itself, but not their values.
                if tensor._version != version or not torch.equal(tensor.detach(), value):
                    with torch.no_grad(), contextlib.suppress(RuntimeError):
                        tensor.detach().copy_(value)
                        set_version(tensor, version)


def _living(failure: BackwardFailure | StepFailure, storages: frozenset[int] | None) -> list[torch.Tensor]:
    """The weights, buffers and variables of the user's frames that live in some storages."""
    if failure.step is None or (storages is not None and not storages):
        return []
    runner = failure.step.runner
    tensors: list[Any] = list(runner.parameters)
    for module in runner.modules:
        tensors += [*module.parameters(), *module.buffers()]
    for frame in failure.evidence.frames:
        if frame.is_user:
            tensors += [*frame.variables.values(), *frame.live.f_globals.values()]
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_inference():
            key = storage_of(tensor)
            if key is not None and (storages is None or key in storages):
                found.setdefault(key, tensor)
    if storages is None and sum(tensor.nbytes for tensor in found.values()) > _MAX_KEPT_BYTES:
        return []
    return list(found.values())
