"""Cures of an out-of-memory on the host, run for real in a copy of the process that has failed.

The copy may throw away what the exception still holds, and if it fails, is killed or takes too long, nothing is lost.
A device cannot be used from a copy: of its memory there are predictions only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import psutil
import torch

from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.cures.predicted import real_step_of, rows_of
from torchmedic.evidence.memory.cures.real_step import Outcome, RealStep
from torchmedic.evidence.memory.fake.rows import Rows
from torchmedic.evidence.memory.fake.whole_step import Change
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.memory import headroom

SECONDS = 12.0  # for all trials of one failure
LONGEST = 3.0  # a step that takes longer is not run again: a copy has but one thread
_GRACE_SECONDS = 2.0
_MAX_HALVINGS = 6  # halvings of the batch
_MIN_FREE_TIMES_LIMIT = 2.0  # times what the process may have that the host must have free


class Proof(NamedTuple):
    """A change, and the outcome of its trial."""

    change: Change
    outcome: Outcome


class ForkedTrials:
    """Trials of one failure: made while its frames are alive, and holding none of them."""

    def __init__(self, step: RealStep, changes: Sequence[Change], agent: ProcessContext) -> None:
        self._changes = changes
        self._step = step
        self._agent = agent

    def run(self, error: BaseException) -> list[Proof]:
        """Try the changes one after the other, each in a forked process.

        Args:
            error: What has ended the step. Nobody may hold anything else that leads to the failed step.
        """
        deadline = time.monotonic() + SECONDS
        proofs: list[Proof] = []
        for change in self._changes:
            if change.rows is not None and any(proof.outcome.passed for proof in proofs):
                continue  # with more rows it has passed already
            left = deadline - time.monotonic()
            if left <= 0:
                break
            proofs.append(Proof(change, self._try(change, error, left)))
        return proofs

    def _try(self, change: Change, error: BaseException, seconds: float) -> Outcome:
        reader, writer = os.pipe()
        try:
            with self._agent.hidden_forks():
                child = os.fork()
        except (OSError, RuntimeError):  # the latter from Python 3.12 on, where the interpreter is shutting down
            os.close(reader)
            os.close(writer)
            return Outcome(None)
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                torch.set_num_threads(1)  # the others were not copied
                self._step.forget(error)
                headroom.impose()
                os.write(writer, msgspec.json.encode(self._step.take(change, seconds)))
            finally:
                os._exit(0)  # nothing of the user's may run twice: no buffers, no handlers
        os.close(writer)
        try:
            told = select.select([reader], [], [], seconds + _GRACE_SECONDS)[0]
            return msgspec.json.decode(os.read(reader, 1 << 16), type=Outcome) if told else Outcome(None)
        except msgspec.DecodeError:
            return Outcome(None)  # it died
        finally:
            os.close(reader)
            with contextlib.suppress(OSError):  # a handler of the user's may have seen to it
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


class TrialPlan(NamedTuple):
    """The cures to try for a diagnosis: one known cure, or all that may help a step that is too large."""

    known: Change | None = None
    unpredicted: tuple[Change, ...] = ()  # what may help, and fake tensors cannot tell
    evaluation: bool = False

    def prepare(self, autopsy: Autopsy) -> ForkedTrials | None:
        """The trials, ready to run without the frames of the failure; None where they are not possible."""
        if self.known is not None:
            step = _step(autopsy, evaluation=False) or _step(autopsy, evaluation=True)
            return ForkedTrials(step, [self.known], autopsy.process) if step is not None else None
        step = _step(autopsy, self.evaluation)
        if step is None:
            return None
        changes = [*_plain(rows_of(autopsy, step), self.evaluation), *self.unpredicted]
        return ForkedTrials(step, changes, autopsy.process) if changes else None


def _step(autopsy: Autopsy, evaluation: bool) -> RealStep | None:
    if autopsy.exhaustion.on_device or torch.cuda.is_initialized() or autopsy.process.clock.usual_step > LONGEST:
        return None
    limit = headroom.address_limit()
    if limit is None or psutil.virtual_memory().available < _MIN_FREE_TIMES_LIMIT * limit:
        return None  # the host itself has no more, and a copy would take it from others
    try:
        return real_step_of(autopsy, evaluation=evaluation)
    except Exception:
        return None  # it cannot be cut


def _plain(rows: int | None, evaluation: bool) -> Iterator[Change]:
    """Changes that can be tried without knowing what the step is made of."""
    if evaluation:
        yield Change(grad=False)
    for cut in range(1, _MAX_HALVINGS + 1):
        if rows is not None and rows >> cut:
            yield Change(rows=Rows(rows >> cut, rows), grad=False if evaluation else None)
