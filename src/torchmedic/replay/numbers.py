"""Evidence on a number that went wrong: the replayed step, and the origin of the bad value in it."""

from __future__ import annotations

import functools
import time
from types import FrameType
from typing import Any

import torch

from torchmedic.detect.nonfinite import TurnedBad
from torchmedic.records import Safety, Treatment
from torchmedic.replay.births import Birth, births
from torchmedic.replay.microscope import Captured, Leaf, Microscope, Op, Spot
from torchmedic.replay.runner import Played
from torchmedic.replay.segment import CannotCut
from torchmedic.replay.step import Step, from_stack
from torchmedic.replay.trial import Edit, attempt

_TIME_LIMIT = 120.0


class NumbersEvidence:
    """What the rules on numbers look at. `why_not` says why there is no replay, where there is none."""

    def __init__(self, incident: TurnedBad, frame: FrameType, agent: Any) -> None:
        self.incident = incident
        self.agent = agent
        self.why_not = ""
        self.step: Step | None = None
        self.scope: Microscope | None = None
        self.played: Played | None = None
        self.faithful = False
        self._deadline = time.monotonic() + _TIME_LIMIT
        try:
            self.step = from_stack(frame, agent, include_failing=False)
        except CannotCut as reason:
            self.why_not = str(reason)
            return
        self._replay(self.step)

    def _replay(self, step: Step) -> None:
        for _ in range(2):
            scope = Microscope(deadline=self._deadline)
            played = step.runner.play(scope)
            if played.error is not None:
                self.why_not = f"the replay stopped: {type(played.error).__name__}: {played.error}"[:300]
                return
            scope.read()
            self.scope, self.played = scope, played
            if self.births or not played.drew_random:
                return
            # The step did not fail again, and it drew random numbers: take over what it drew instead.
            step.runner.frozen = played.drew_random
            self.__dict__.pop("births", None)
        self.why_not = "the replayed step was finite"

    @functools.cached_property
    def births(self) -> list[Birth]:
        """Where the bad values of the loss, else of the gradients, come from; earliest first."""
        scope, played = self.scope, self.played
        if scope is None or played is None:
            return []
        targets = [source for root in played.roots if (source := scope.producer_of(root)) is not None]
        found = births(scope, targets)
        if found:
            return found
        ends = [op.index for op in scope.ops if op.node.endswith("AccumulateGrad")]
        inputs = [given for end in ends for given in scope.ops[end].inputs]
        return births(scope, inputs)

    @property
    def birth(self) -> Birth | None:
        return self.births[0] if self.births else None

    @functools.cached_property
    def captured(self) -> Captured | None:
        """The operation at the origin with its values, from a second pass."""
        birth = self.birth
        if birth is None or birth.op is None or self.step is None:
            return None
        scope = Microscope(capture=frozenset({birth.op.index}), deadline=self._deadline)
        self.step.runner.play(scope)
        if birth.op.index >= len(scope.ops):
            return None
        again = scope.ops[birth.op.index]
        return again.captured if again.name == birth.op.name else None

    @property
    def op(self) -> Op | None:
        return self.birth.op if self.birth is not None else None

    @property
    def forward_op(self) -> Op | None:
        """The forward operation to blame: the origin itself, or the one that it differentiates."""
        op = self.op
        if op is None or self.scope is None:
            return None
        return self.scope.ops[op.forward] if op.is_backward and op.forward is not None else op

    @property
    def spot(self) -> Spot | None:
        return self.scope.spot_of(self.op) if self.scope is not None and self.op is not None else None

    def trial(self, title: str, text: str, *, spot: Spot | None = None, safety: Safety = "edit") -> Treatment | None:
        """Try other source for the expression at the origin. None where the step does not end well with it."""
        spot = spot or self.spot
        if spot is None or self.step is None:
            return None
        verdict = attempt(self.step, Edit(spot, text))
        if not verdict.passed:
            return None
        return Treatment(title=title, safety=safety, proven=True, result=verdict.result, patch=verdict.patch)

    def name_of(self, leaf: Leaf) -> tuple[str, str]:
        """What a leaf is: its kind (`parameter`, `buffer`, `batch`, `tensor`) and its name."""
        tensor = leaf.tensor
        storage = tensor.untyped_storage()._cdata
        if self.step is not None:
            for module in self.step.runner.modules:
                for name, value in module.named_parameters():
                    if value.untyped_storage()._cdata == storage:
                        return "parameter", name
                for name, buffer in module.named_buffers():
                    if buffer.untyped_storage()._cdata == storage:
                        return "buffer", name
        for value in self.agent.batches.tensors():
            if value.untyped_storage()._cdata == storage:
                return "batch", ""
        if self.played is not None:
            for name, value in self.played.namespace.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage:
                    return "tensor", name
        return "tensor", ""
