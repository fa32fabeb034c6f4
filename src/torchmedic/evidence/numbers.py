"""Evidence on a number that went wrong: the replayed step, and the origin of the bad value in it."""

from __future__ import annotations

import ast
import math
import time
from types import FrameType
from typing import Literal

import msgspec

from torchmedic.detect.failures.nonfinite import NonFinite
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.weight_stand_ins import ExchangedWeights, leaf_name
from torchmedic.observe.context import StepContext
from torchmedic.observe.numbers.weight_copies import Original
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.records import Safety, Treatment
from torchmedic.records.numbers import TriedCure
from torchmedic.replay.isolation.outside_world import Refused
from torchmedic.replay.isolation.redraws import has_generators
from torchmedic.replay.step.captured_values import SecondPass
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.runner import Runner
from torchmedic.replay.step.step import Step, from_stack
from torchmedic.replay.step.trial import Edit, attempt, treatment
from torchmedic.replay.trace.bad_value_origins import Birth, births
from torchmedic.replay.trace.microscope import Captured, Leaf, Microscope, Op, Spot, Value
from torchmedic.replay.trace.operations import storage_of
from torchmedic.source.live_frames import Frame, stack_of
from torchmedic.source.objects.graph import FREED
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.user_code import user_frame

Victim = Literal["loss", "gradient"]

_TIME_LIMIT_SECONDS = 120.0
_MAX_REDRAWS = 64
_REDRAW_SECONDS = 8.0
_OTHER_DRAWS = "your step, with other draws"
_MAX_TRIED = 12  # cures without success that are kept for the report
OF_UPDATE = ("rate", "update")  # incidents of several steps or of the optimizer: the step was finite


class NumbersEvidence:
    """What the rules on numbers look at.

    The constructor stores what is known, `replay` runs the step, `replay_with_values` gives values of an operation.

    Args:
        incident: The number that is not finite.
        agent: What was noted of the step.
        frames: The stack, outermost first.
        noticed: The user's frame in which the number was noticed.
        step: The step to replay; None if it cannot be cut out of its frame.
        why_not: Why there is no step.
        deadline: When replays end at the latest; by default some time from now.
    """

    def __init__(
        self,
        incident: NonFinite,
        agent: StepContext,
        frames: list[Frame],
        noticed: Frame | None,
        step: Step | None = None,
        *,
        why_not: str = "",
        deadline: float | None = None,
    ) -> None:
        self.incident = incident
        self.step_number, self.rank = incident.step, incident.rank
        self.agent = agent
        self.frames = frames
        self.noticed = noticed
        self.step = step
        self.why_not = why_not  # why there is no origin, where none was found
        self.weights: ExchangedWeights | None = None  # other ones than the present, between exchange and restore
        self.is_unexplained = False  # the weights were spoiled by a step before, and no replay shows how
        self.history = ""  # which step was replayed and with which weights, where those are not the present ones
        self.divergence: Divergence | None = None  # the last steps, where the loss has grown in them
        self.why_no_divergence = ""  # why the last steps could not be run again
        self.deadline = time.monotonic() + _TIME_LIMIT_SECONDS if deadline is None else deadline
        # Filled by `replay`:
        self.scope: Microscope | None = None
        self.played: ReplayResult | None = None
        self.faithful: bool | None = None  # None: cannot be told
        self.victim: Victim = "loss"
        self.births: list[Birth] = []  # where the bad values of the victim come from, earliest first
        self._second_pass: SecondPass | None = None  # filled by `replay_with_values`
        self.tried: list[TriedCure] = []  # filled by `trial`: cures that did not help

    @classmethod
    def at_frame(cls, incident: NonFinite, frame: FrameType | None, agent: StepContext) -> NumbersEvidence:
        """Evidence on the step that is running in a frame, seen from inside a hook."""
        user = user_frame(frame)
        noticed = Frame(user, user.f_lasti, user.f_lineno) if user is not None else None
        step, why_not = None, "the step itself was finite"
        if incident.quantity not in OF_UPDATE:
            try:
                step, why_not = from_stack(frame, agent, include_failing=incident.stage == "backward"), ""
            except CannotCut as reason:
                why_not = str(reason)
        return cls(incident, agent, stack_of(frame), noticed, step, why_not=why_not)

    @property
    def complaint(self) -> str:
        """What an exception said of the number, if there was one."""
        return ""

    @property
    def victim_name(self) -> str:
        """What is known to be bad, if that is neither the loss nor a gradient."""
        return ""

    # The replay

    def replay(self) -> None:
        """Replay the step in the way that repeats it best, and keep to that way."""
        if self.step is None:
            return
        self._replay_whole(self.step.runner)
        part = self.step.last_part
        if part is None or self._is_good():
            return
        # What the step has put into lists before this function was called is still there.
        known = dict(vars(self))
        self.step = part
        if not self.replay_once() or not self._is_good():
            vars(self).update(known)

    def _replay_whole(self, runner: Runner) -> None:
        runner.takes_over = runner.ends_at_exchange = True
        if not self.replay_once() or self._is_good():
            return
        assert self.played is not None
        if self.played.taken:
            # What was taken over is where the bad value is, or was changed since: run it all.
            known = dict(vars(self))
            runner.takes_over = False
            if not self.replay_once() or self._is_good():
                return
            if known["births"] and not self.births:
                # Run anew, the step drew other data, and was finite: the bad value came with the data.
                vars(self).update(known)
                runner.takes_over = True
                return
        if self.played.drew_random:
            # It did not fail again, or not in the same way, and it drew random numbers: take over what the step drew.
            runner.frozen = self.played.drew_random
            if not self.replay_once() or self._is_good():
                return
        if not self.births and not self._draw_again(runner):
            self.why_not = "the replayed step was finite"

    def _draw_again(self, runner: Runner) -> bool:
        """Run a step that draws its data from generators of the user's with other draws, until it fails like the step.

        The values are others than those of the step, and the replay is not faithful; the line is the same.
        """
        if self.faithful is not False or self.played is None or not has_generators(self.played.namespace):
            return False
        usual, until = runner.takes_over, min(self.deadline, time.monotonic() + _REDRAW_SECONDS)
        runner.takes_over = False
        for runner.seed in range(_MAX_REDRAWS):
            if time.monotonic() > until:
                break
            played = runner.play()
            if played.error is not None and not self._is_expected(played.error):
                break
            if played.loss_finite == self.loss_is_bad or (played.loss_finite and played.gradients_finite is not False):
                continue
            if self.replay_once() and self.births:
                return True
        runner.seed, runner.takes_over = None, usual
        return False

    def replay_once(self) -> bool:
        """Replay the step under the microscope as its runner is set up; whether the replay came to its end."""
        if self.step is None:
            return False
        runner = self.step.runner
        trained = {id(tensor): tensor for tensor in [*runner.parameters, *runner.loose_leaves]}
        scope = Microscope(deadline=self.deadline, watch=list(trained.values()))
        played = runner.play(scope)
        if isinstance(played.error, Refused) and not runner.answers_exchanges:
            runner.answers_exchanges = True  # this rank stands in for those that the step asked
            return self.replay_once()
        if played.error is not None and not self._is_expected(played.error):
            self.why_not = f"the replay stopped: {type(played.error).__name__}: {played.error}"[:300]
            return False
        targets = self._find_targets(scope, played)
        scope.read()
        self.scope, self.played, self._second_pass = scope, played, None
        self.victim, self.births = self._find_births(scope, targets)
        self.faithful = self._is_faithful(played)
        other_weights = self.weights is not None and not (self.weights.are_real and self.faithful)
        if other_weights or played.stood_in or played.answered:
            self.faithful = None  # with other weights the loss is another one
        if runner.seed is not None:
            self.faithful = False
        return True

    def replay_with_values(self, op: Op | None) -> Captured | None:
        """An operation with its values, which only another replay keeps: the first one saw too many.

        An operation is replayed once; its values are kept. None if that replay did not go the same way.
        """
        if op is None or self.step is None or self.scope is None:
            return None
        if self._second_pass is None:
            self._second_pass = SecondPass(self.step, self.scope, self.deadline)
        return self._second_pass.values_of(op)

    @property
    def why_no_values(self) -> str:
        """Why `replay_with_values` gave None."""
        error = self._second_pass.error if self._second_pass is not None else None
        return f"a second replay stopped ({error})" if error is not None else "a second replay did not go the same way"

    # Other weights

    def exchange_weights(self, originals: list[Original]) -> None:
        """Put earlier weights in place of the present ones, and finite values where those are not finite."""
        assert self.step is not None
        self.weights = ExchangedWeights(self.step.runner, originals)

    @property
    def has_own_weights(self) -> bool:
        """Whether the step was replayed with the very weights that it had."""
        return self.weights is None or (self.weights.are_real and self.weights.steps == {self.incident.step})

    @property
    def has_stand_ins(self) -> bool:
        """Whether the step was replayed with invented weights, or with invented values of other ranks."""
        invented = self.weights is not None and not self.weights.are_real
        return invented or (self.played is not None and (self.played.stood_in or self.played.answered))

    def restore_weights(self) -> None:
        """Undo `exchange_weights`."""
        if self.weights is not None:
            self.weights.put_back()
            self.weights = None

    def _is_good(self) -> bool:
        """Whether the replay was the step, as far as can be told, and shows where the bad value was born."""
        if not self.births or self.faithful is False or self.played is None:
            return False
        return not self.taken_name

    @property
    def taken_name(self) -> str:
        """The variable with the bad value, if the replay took it over instead of computing it again."""
        leaf = self.births[0].leaf if self.births else None
        wanted = storage_of(leaf.tensor) if leaf is not None else None
        for name, value in self.played.taken.items() if self.played is not None and leaf is not None else ():
            if any(storage_of(tensor) == wanted for tensor in tensors_in(value)):
                return name
        return ""

    def _is_expected(self, error: BaseException) -> bool:
        """Whether backward met a graph from before the step, which the step itself has freed: the loss is there."""
        return self.incident.quantity == "loss" and FREED in str(error)

    def _is_faithful(self, played: ReplayResult) -> bool | None:
        loss = self.incident.loss
        roots = [root for root in played.roots if root.numel() == 1]
        if loss is None or not roots or self.agent.finite.losses.is_scaled:
            return None
        value = float(roots[-1].detach().item())
        return value == loss or (math.isnan(value) and math.isnan(loss))

    def _find_targets(self, scope: Microscope, played: ReplayResult) -> list[tuple[Victim, list[Value]]]:
        """Where bad values are looked for: in the loss, else in the gradients."""
        roots = [scope.value_of(root) for root in played.roots]
        gradients = [value for _, value in scope.gradients]
        accumulated = [value for op in scope.ops if op.node.endswith("AccumulateGrad") for value in op.inputs]
        return [("loss", roots), ("gradient", gradients), ("gradient", accumulated)]

    def _find_births(self, scope: Microscope, targets: list[tuple[Victim, list[Value]]]) -> tuple[Victim, list[Birth]]:
        """Where the bad values of the first target that has any come from."""
        for victim, values in targets:
            if found := births(scope, values):
                return victim, found
        return "loss", []

    def receives(self, leaf: Leaf) -> ast.stmt | None:
        """The statement that got a leaf from another rank."""
        return self.played.received.get(leaf.tensor.data_ptr()) if self.played is not None else None

    @property
    def birth(self) -> Birth | None:
        return self.births[0] if self.births else None

    @property
    def op(self) -> Op | None:
        return self.birth.op if self.birth is not None else None

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
        if self.incident.loss is not None and self.weights is None:
            return not math.isfinite(self.incident.loss)
        return self.victim == "loss" if self.births else self.incident.quantity == "loss"

    @property
    def is_redrawn(self) -> bool:
        """Whether the replayed step drew other data than the step, from random generators of the user's."""
        return self.step is not None and self.step.runner.seed is not None

    # Cures

    def trial(
        self, title: str, text: str, *, spot: Spot | None = None, safety: Safety = "edit", same_values: bool = True
    ) -> Treatment | None:
        """Try other source for the expression at the origin. None where the step does not end well with it.

        Args:
            title: The advice.
            text: The other source.
            spot: Another place than the origin.
            safety: What it changes.
            same_values: Whether the elements that were right must stay what they are.
        """
        spot, step = spot or self.spot, self.trial_step
        if spot is None or step is None or time.monotonic() > self.deadline:
            return None
        is_redrawn = step.runner.seed is not None
        is_known = (
            not is_redrawn and not self.loss_is_bad and not self.agent.finite.losses.is_scaled and self.has_own_weights
        )
        loss = self.incident.loss if is_known else None
        verdict = attempt(step, Edit(spot, text), close_loss=loss, same_values=same_values)
        if not verdict.passed and verdict.patch and len(self.tried) < _MAX_TRIED:
            self.tried.append(TriedCure(title=title, result=verdict.result, patch=verdict.patch))
        found = treatment(title, verdict, safety=safety)
        return msgspec.structs.replace(found, tried_on=_OTHER_DRAWS) if found is not None and self.is_redrawn else found

    @property
    def trial_step(self) -> Step | None:
        """The step that cures are tried on."""
        return self.step

    def name_of(self, leaf: Leaf) -> tuple[str, str]:
        """The kind of a leaf (`parameter`, `buffer`, `batch`, `tensor`) and its name."""
        runner = self.step.runner if self.step is not None else None
        names = self.played.namespace if self.played is not None else {}
        return leaf_name(leaf.tensor, runner, self.agent.batches.tensors(), names)
