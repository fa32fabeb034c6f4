"""Evidence on a number that went wrong: the replayed step, and the origin of the bad value in it."""

from __future__ import annotations

import functools
import math
import time
from types import FrameType
from typing import Literal

from torchmedic.detect.failures.nonfinite import NonFinite, of_call
from torchmedic.evidence.leaf_names import leaf_name
from torchmedic.evidence.spoiled_weights import go_back
from torchmedic.evidence.weight_stand_ins import Rewound, StandIns
from torchmedic.observe.context import StepContext
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.numbers.weight_copies import Original
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.records import Location, Safety, Treatment
from torchmedic.replay.step.captured_values import SecondPass
from torchmedic.replay.step.earlier_step import earlier_step
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step, from_stack
from torchmedic.replay.step.trial import Edit, attempt, treatment
from torchmedic.replay.trace.bad_value_origins import Birth, births
from torchmedic.replay.trace.microscope import Captured, Leaf, Microscope, Op, Spot, Value
from torchmedic.replay.trace.storages import storage_of
from torchmedic.source.live_frames import Frame, stack_of
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.user_code import user_frame

Victim = Literal["loss", "gradient"]

_TIME_LIMIT = 120.0


class NumbersEvidence:
    """What the rules on numbers look at. `why_not` says why there is no origin, where none was found."""

    step: Step | None

    def __init__(self, incident: NonFinite, frame: FrameType | None, agent: StepContext) -> None:
        user = user_frame(frame)
        noticed = Frame(user, user.f_lasti, user.f_lineno) if user is not None else None
        self._begin(incident, agent, stack_of(frame), noticed)
        if incident.quantity in ("rate", "update"):
            self.why_not = "the step itself was finite"
            return
        try:
            self.step = from_stack(frame, agent, include_failing=incident.stage == "backward")
        except CannotCut as reason:
            self.why_not = str(reason)
        else:
            self.replay(self.step)
        go_back(self, frame)

    def _begin(self, incident: NonFinite, agent: StepContext, frames: list[Frame], noticed: Frame | None) -> None:
        self.incident = incident
        self.agent = agent
        self.frames = frames  # outermost first
        self.noticed = noticed
        self.why_not = ""
        self.step = None
        self.scope: Microscope | None = None
        self.played: ReplayResult | None = None
        self.faithful: bool | None = None  # None: cannot be told
        self._deadline = time.monotonic() + _TIME_LIMIT
        self.stand_ins: StandIns | None = None
        self.rewound: Rewound | None = None
        self.is_unexplained = False  # the weights were spoiled by a step before, and no replay shows how
        self.history = ""  # which step was replayed and with which weights, where those are not the present ones
        self._second_pass: SecondPass | None = None
        self.targets: list[tuple[Victim, list[Value]]] = []

    @property
    def step_number(self) -> int:
        return self.incident.step

    @property
    def rank(self) -> int:
        return self.incident.rank

    @property
    def complaint(self) -> str:
        """What an exception said of it, where one did."""
        return ""

    @property
    def victim_name(self) -> str:
        """What is known to be bad, if that is neither the loss nor a gradient."""
        return ""

    # The replay

    def replay(self, step: Step) -> None:
        """Replay the step in the way that repeats it best, and keep to that way."""
        runner = step.runner
        runner.takes_over = True
        if not self.look(step) or self._is_good():
            return
        assert self.played is not None
        if self.played.taken:
            # What was taken over is where the bad value is, or was changed since: run it all.
            runner.takes_over = False
            if not self.look(step) or self._is_good():
                return
        if self.played.drew_random:
            # It did not fail again, or not in the same way, and it drew random numbers: take over what the step drew.
            runner.frozen = self.played.drew_random
            if not self.look(step) or self._is_good():
                return
        if not self.births:
            self.why_not = "the replayed step was finite"

    # Another step than the one under way

    def turn_to(self, call: KeptBackward, frame: FrameType | None) -> Step | None:
        """Make an earlier call of backward the one that is examined."""
        if time.monotonic() > self._deadline:
            return None
        try:
            self.step, self.agent = earlier_step(call, frame, self.agent)
        except CannotCut as reason:
            self.why_not = str(reason)
            return None
        self.incident = of_call(self.incident, call)
        return self.step

    def exchange_weights(self, step: Step, originals: list[Original]) -> None:
        """Put weights of before in place of the present ones, and something finite where those are not."""
        if originals:
            self.rewound = Rewound(originals)
        buffers = [buffer for module in step.runner.modules for buffer in module.buffers()]
        stand_ins = StandIns([*step.runner.parameters, *step.runner.loose_leaves, *buffers])
        self.stand_ins = stand_ins if len(stand_ins) or not originals else None
        self.forget_findings()

    @property
    def has_own_weights(self) -> bool:
        """Whether the step was replayed with the very weights that it had."""
        if self.stand_ins is not None:
            return False
        return self.rewound is None or self.rewound.steps == {self.incident.step}

    def restore(self) -> None:
        """Put everything back that the evidence has changed."""
        if self.stand_ins is not None:
            self.stand_ins.put_back()
            self.stand_ins = None
        if self.rewound is not None:
            self.rewound.put_back()
            self.rewound = None

    def forget_findings(self) -> None:
        self.__dict__.pop("found", None)
        self._second_pass = None

    def look(self, step: Step) -> bool:
        """One replay under the microscope; whether it came to its end."""
        trained = {id(tensor): tensor for tensor in [*step.runner.parameters, *step.runner.loose_leaves]}
        scope = Microscope(deadline=self._deadline, watch=list(trained.values()))
        played = step.runner.play(scope)
        if played.error is not None and not self._is_expected(played.error):
            self.why_not = f"the replay stopped: {type(played.error).__name__}: {played.error}"[:300]
            return False
        self.scope, self.played = scope, played
        self.targets = self._find_targets(scope, played)
        self.forget_findings()
        scope.read()
        self.faithful = self._is_faithful(played)
        if self.stand_ins is not None or (self.rewound is not None and not self.faithful):
            self.faithful = None  # with other weights the loss is another one
        return True

    def _is_good(self) -> bool:
        """Whether the replay was the step, as far as can be told, and shows where the bad value was born."""
        if not self.births or self.faithful is False or self.played is None:
            return False
        leaf = self.births[0].leaf
        taken = {storage_of(tensor) for value in self.played.taken.values() for tensor in tensors_in(value)}
        return leaf is None or storage_of(leaf.tensor) not in taken

    def _is_expected(self, error: BaseException) -> bool:
        return False

    def _is_faithful(self, played: ReplayResult) -> bool | None:
        loss = self.incident.loss
        roots = [root for root in played.roots if root.numel() == 1]
        if loss is None or not roots or self._is_scaled:
            return None
        value = float(roots[-1].detach().item())
        return value == loss or (math.isnan(value) and math.isnan(loss))

    @property
    def _is_scaled(self) -> bool:
        return bool(self.agent.finite.is_scaled)

    def _find_targets(self, scope: Microscope, played: ReplayResult) -> list[tuple[Victim, list[Value]]]:
        """Where bad values are looked for: in the loss, else in the gradients."""
        roots = [scope.value_of(root) for root in played.roots]
        gradients = [value for _, value in scope.gradients]
        ends = [op for op in scope.ops if op.node.endswith("AccumulateGrad")]
        accumulated = [value for op in ends for value in op.inputs]
        return [("loss", roots), ("gradient", gradients), ("gradient", accumulated)]

    @functools.cached_property
    def found(self) -> tuple[Victim, list[Birth]]:
        for victim, targets in self.targets:
            found = births(self.scope, targets) if self.scope is not None else []
            if found:
                return victim, found
        return "loss", []

    @property
    def births(self) -> list[Birth]:
        """Where the bad values of the loss, else of the gradients, come from; earliest first."""
        return self.found[1]

    # The origin

    @property
    def birth(self) -> Birth | None:
        return self.births[0] if self.births else None

    @property
    def op(self) -> Op | None:
        return self.birth.op if self.birth is not None else None

    @property
    def captured(self) -> Captured | None:
        """The operation at the origin with its values, from a second pass."""
        return self.values_of(self.op) if self.op is not None else None

    @property
    def forward_op(self) -> Op | None:
        """The forward operation to blame: the origin itself, or the one that it differentiates."""
        return self.scope.forward_of(self.op) if self.op is not None and self.scope is not None else None

    @property
    def spot(self) -> Spot | None:
        return self.scope.spot_of(self.op) if self.scope is not None and self.op is not None else None

    @property
    def loss_is_bad(self) -> bool:
        """Whether the loss itself was not finite, not only its gradients."""
        if self.incident.loss is not None and self.stand_ins is None and self.rewound is None:
            return not math.isfinite(self.incident.loss)
        return self.found[0] == "loss" if self.births else self.incident.quantity == "loss"

    def values_of(self, op: Op) -> Captured | None:
        """An operation with its values. None where a second pass did not go the same way."""
        if self._second_pass is None:
            if self.step is None or self.scope is None:
                return None
            self._second_pass = SecondPass(self.step, self.scope, self._deadline)
        return self._second_pass.values_of(op)

    # Cures

    def trial(
        self,
        title: str,
        text: str,
        *,
        spot: Spot | None = None,
        safety: Safety = "edit",
        same_values: bool = True,
    ) -> Treatment | None:
        """Try other source for the expression at the origin. None where the step does not end well with it.

        Args:
            title: The advice.
            text: The other source.
            spot: Another place than the origin.
            safety: What it changes.
            same_values: Whether the elements that were right must stay what they are.
        """
        spot = spot or self.spot
        step = self.trial_step
        if spot is None or step is None or time.monotonic() > self._deadline:
            return None
        known = not self.loss_is_bad and not self._is_scaled and self.has_own_weights
        loss = self.incident.loss if known else None
        verdict = attempt(step, Edit(spot, text), close_loss=loss, same_values=same_values)
        return treatment(title, verdict, safety=safety)

    @property
    def trial_step(self) -> Step | None:
        """The step that cures are tried on."""
        return self.step

    # Names

    def name_of(self, leaf: Leaf) -> tuple[str, str]:
        """What a leaf is: its kind (`parameter`, `buffer`, `batch`, `tensor`) and its name."""
        runner = self.step.runner if self.step is not None else None
        names = self.played.namespace if self.played is not None else {}
        return leaf_name(leaf.tensor, runner, self.agent.batches.tensors(), names)

    def noticed_at(self, label: str) -> Location | None:
        return self.noticed.location("surfaced", label) if self.noticed is not None else None
