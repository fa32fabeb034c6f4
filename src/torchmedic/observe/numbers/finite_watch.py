"""Whether the loss, the gradients and the weights are finite, checked without waiting and at next to no cost.

The losses are read by `losses`. Gradients are looked at when the optimizer is about to step, but only on the CPU: all
of them as long as that stays within a small share of the run's time, else the first and now and then another; and so
are the weights after the step. What a bad gradient does on a late device shows in the next loss; for that the last
calls of backward and a copy of the weights are kept (`kept_steps`, `weight_copies`).

A bad loss on the CPU is examined at once, while its batch is there, but nothing is said before an update is about to
use its gradients: a script may well drop them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from torchmedic.observe.budget import Budget
from torchmedic.observe.device import async_devices
from torchmedic.observe.numbers.finite_checks import (
    FiniteChecks,
    Witness,
    all_bad,
    cheapest_witness,
    finite_rates,
    gradients,
    is_bad_witness,
    is_fine,
    is_there,
    kind_of_device,
    leaf_gradients,
    may_be_read,
    with_gradient,
    witness_of,
)
from torchmedic.observe.numbers.growth_question import GrowthQuestion
from torchmedic.observe.numbers.kept_steps import KeptBackwards
from torchmedic.observe.numbers.late_norms import LateNorms
from torchmedic.observe.numbers.losses import Losses
from torchmedic.observe.numbers.step_memory import StepMemory
from torchmedic.observe.numbers.weight_copies import Rewind
from torchmedic.observe.stages import Finding, UpdateStage
from torchmedic.source.objects.finite import is_finite

if TYPE_CHECKING:
    from torchmedic.observe.agent import Agent
    from torchmedic.observe.step.clock import Clock

_MAX_EXAMINED_AHEAD = 2  # bad losses that are examined before it is known whether their gradients are used
_MAX_SKIPPED_BAD = 3  # steps in a row that GradScaler skips although the loss itself was bad: no scale helps
_MAX_SKIPPED = 25  # steps in a row that GradScaler skips at all
_FIRST_LOOK_BACK = 96  # updates, after which it is asked what the loss has done since the first ones
_LAST_LOOK_BACK = 800
_NEVER = 1 << 62


class FiniteWatch:
    """Notices the first step that is about to write NaN or infinity into the weights."""

    def __init__(self, examiner: Agent, kept_backwards: KeptBackwards, rewind: Rewind, budget: Budget) -> None:
        self._examiner = examiner
        self._rewind = rewind
        self.memory = StepMemory(kept_backwards, rewind, budget.memory)
        self._question = GrowthQuestion(self.memory)
        self.on = True
        self.losses = Losses(kept_backwards, self.memory, examiner.mark)
        self.scaled = self.losses.scaled
        self.born_bad: set[int] = set()  # weights that were not finite when training began
        self.skipped = 0  # steps in a row that GradScaler skipped
        self.lowest_scale: float | None = None
        self._finding: Finding | None = None
        self._witness: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None
        self._noted = 0  # backward calls when a loss was last remembered
        self._examined = 0
        self.steps = 0  # updates of any optimizer
        self._next_look_back = _FIRST_LOOK_BACK
        self._skipped_bad = 0
        self._roots: list[weakref.ref[torch.Tensor]] = []
        self._seen: dict[int, Witness] = {}  # optimizers that have stepped, and the gradient to look at in every step
        self.wants_weights = False  # to be looked at when they have been touched
        self.gradient_norm: float | None = None  # at the last update, where all gradients were looked at
        self.late_norms = LateNorms(budget.norms)
        self._checks = FiniteChecks(budget.finite)

    # For the curves of the report

    @property
    def last_loss(self) -> float | None:
        """The last loss of the last backward, if it was read and is not multiplied by a GradScaler."""
        losses = self.losses
        return losses.last[-1] if losses.last and not losses.are_scaled_late else None

    @property
    def last_key(self) -> Any:
        return self.losses.key

    # The loss

    def backward_begins(
        self,
        roots: Sequence[torch.Tensor],
        key: Any,
        frame: FrameType,
        stepping: Any = None,
        *,
        has_optimizers: bool = True,
        leaves: list[torch.Tensor] | None = None,
    ) -> None:
        if self.steps == 0:  # as long as there may be nobody who steps
            self._roots = [weakref.ref(root) for root in roots if isinstance(root, torch.Tensor)]
        self.losses.begin(roots, key, frame, self.steps)
        call = self.losses.call
        if call is not None and has_optimizers:
            self.memory.backward_begins(call, stepping)
        elif call is not None:
            self.memory.note_leaves(call, roots, leaves)
            if not self.losses.last_is_bad:
                self.memory.backward_by_hand_begins(call, key)
                self._ask_about_growth(None, frame, "backward")

    def sampled_out_backward_begins(self, roots: Sequence[torch.Tensor], step: int) -> None:
        """A backward begins in a short step that is sampled out."""
        self.losses.begin_sampled_out(roots, step, self.steps)

    def backward_ended(self, frame: FrameType, clock: Clock, stepping: Any) -> None:
        """Backward is over.

        Args:
            frame: Somewhere below the user's call.
            clock: Knows the optimizers that there are.
            stepping: The optimizer whose step is under way: backward was called by a closure.
        """
        has_optimizers = clock.optimizer_count > 0
        if not self.losses.last_is_bad and stepping is None and has_optimizers:
            return  # nearly always; the gradients are looked at when they are used
        if self.losses.last_is_bad:
            self._witness = witness_of(clock.optimizers)
        used = stepping is not None or (self.steps == 0 and (not has_optimizers or self.losses.backwards > 2))
        if self.losses.last_is_bad and not self.losses.is_scaled:
            if self._finding is None and (used or self._examined < _MAX_EXAMINED_AHEAD):
                self._examined += 1
                self._finding = self._examiner.examine(stepping, frame, "loss", "backward")
            if used and self._finding is not None:
                self._publish(self._finding)
        elif not has_optimizers and self.losses.late.are_coming:
            self._look_back(frame)
        elif stepping is not None and may_be_read(stepping) and self._checks.any_bad_gradient(stepping):
            self._publish(self._examiner.examine(stepping, frame, "gradient", "backward"))
        elif not has_optimizers and self._checks.is_left and self._checks.any_bad(leaf_gradients(self._roots)):
            # Nobody will step: the loop updates its weights by hand.
            self._publish(self._examiner.examine(None, frame, "gradient", "backward"))

    def _look_back(self, frame: FrameType) -> None:
        """Look at the losses that have arrived from a late device, where no optimizer will step."""
        while (read := self.losses.late.first_arrived()) is not None:
            self.losses.take(read)
            if self.losses.last_is_bad:
                self._publish(self._examiner.examine(None, frame, "loss", "backward"))
                return

    def cleared(self) -> None:
        """The gradients of suspected losses are gone."""
        self.losses.cleared()
        self._finding = None

    # The gradients

    def step_begins(self, optimizer: Any, frame: FrameType, optimizers: Callable[[], list[Any]]) -> None:
        """The weights are about to be touched: the last moment at which the step can be replayed as it was."""
        self.wants_weights = False
        self.gradient_norm = None
        kind = kind_of_device(optimizer)
        is_late = kind in async_devices.devices
        if is_late and not async_devices.devices[kind].may_work():
            return  # a graph is being captured: this is no step yet
        self._settle_pending(frame)
        if not self.on:
            return
        if id(optimizer) not in self._seen:
            self._seen[id(optimizer)] = cheapest_witness(optimizer)
            self.born_bad |= all_bad(with_gradient(optimizer), at_once=is_late)
        losses = self.losses
        self.memory.is_late = is_late
        if (
            not losses.bad
            and (self.memory.is_open or not losses.is_ordinary())
            and self._remember(optimizer, frame, optimizers)
        ):
            return
        self.steps += 1
        self.skipped = self._skipped_bad = 0
        suspect, finding = self.losses.bad > 0, self._finding
        kept = self.losses.last_is_bad or is_there(self._witness)
        self.cleared()
        if not finite_rates(optimizer):
            self._publish(self._examiner.examine(optimizer, frame, "rate", "step"))
        elif suspect:
            if kept or not all(is_finite(gradient) for gradient in gradients(optimizer)):
                self._publish(finding or self._examiner.examine(optimizer, frame, "loss", "step"))
        elif is_late:
            self._examiner.mark("update")
            if self.losses.is_good:
                self._rewind.offer(optimizer, *self._examiner.usual_step())
        elif kind == "cpu":
            if self.steps >= self._next_look_back:
                self._look_back_at_losses(optimizer, frame)
            self._look_at_gradients(optimizer, frame)

    def _remember(self, optimizer: Any, frame: FrameType, optimizers: Callable[[], list[Any]]) -> bool:
        """Keep what it takes to run this update again; whether the loss was found to have run away."""
        losses = self.losses
        is_new = losses.backwards != self._noted  # several optimizers may step after one backward
        self._noted = losses.backwards
        loss = losses.last[-1] if losses.last and is_new else None
        self.memory.update_begins(optimizer, optimizers, frame, self.steps, losses.key, loss)
        losses.ceiling = self.memory.ceiling
        losses.alarm = losses.alarm or not losses.ceiling  # every loss is looked at: the next step is noted in full
        return self._ask_about_growth(optimizer, frame, "step")

    def _ask_about_growth(self, optimizer: Any, frame: FrameType, stage: UpdateStage) -> bool:
        """Whether the loss was found to have run away."""
        found = self._question.answer(lambda: self._examiner.examine(optimizer, frame, "growth", stage))
        if found is not None:
            self._publish(found)
        return found is not None

    def _look_back_at_losses(self, optimizer: Any, frame: FrameType) -> None:
        """Ask why the loss is still where it was at first, or why it has fallen below zero."""
        is_first = self._next_look_back == _FIRST_LOOK_BACK
        self._next_look_back = 2 * self.steps if self.steps < _LAST_LOOK_BACK else _NEVER
        found = None
        if self.losses.have_sunk(is_first=is_first):
            found = self._examiner.examine(optimizer, frame, "sunk", "step")
        elif is_first and self.losses.stand_still:
            found = self._examiner.examine(optimizer, frame, "standstill", "step")
        if found is not None:
            self._publish(found)

    def run_ends(self) -> None:
        """The process ends, and no exception was the reason: a loss that has grown will not come back."""
        found = self._question.last_word() if self.on else None
        if found is not None:
            self._publish(found)

    # Steps that are only glanced at

    def witness(self, optimizer: Any) -> Witness | None:
        """The gradient to look at in every step; None before the first update."""
        return self._seen.get(id(optimizer))

    def begin_fast_steps(self) -> None:
        self.wants_weights = False
        self.gradient_norm = None
        self.skipped = 0
        self.losses.begin_stretch()

    def steps_passed(self, count: int) -> None:
        """Updates are over before which `is_fine` was asked, and nothing else."""
        self._checks.passed(count)

    def glance_at_gradients(self, optimizer: Any, frame: FrameType) -> bool:
        """Fast path of `step_begins` for short steps; False: nothing was done yet, take the full path."""
        witness = self._seen.get(id(optimizer))
        if witness is None:
            return False
        self.wants_weights = False
        self.gradient_norm = None
        if self.losses.late.held:
            pass  # nothing can be known now: the loss is kept on a late device
        elif self._checks.is_due() and may_be_read(optimizer) and finite_rates(optimizer):
            self._look_at_all(optimizer, frame)
        elif not is_fine(optimizer, witness):
            return False
        self.steps += 1
        self.skipped = 0
        return True

    @property
    def is_rising(self) -> bool:
        """Whether a loss was far above its usual size a short time ago: the steps are worth to be noted in full."""
        return self.losses.alarm > 0

    @property
    def is_calm(self) -> bool:
        """Whether nothing is suspected and no loss is awaited."""
        losses = self.losses
        return self.on and not losses.bad and not losses.last_is_bad and not losses.late.are_coming

    def _look_at_gradients(self, optimizer: Any, frame: FrameType) -> None:
        """Look at all gradients, or at one of the first, as the budget allows."""
        witness = self._seen[id(optimizer)]
        if self._checks.is_due():
            self._look_at_all(optimizer, frame)
        elif not is_fine(optimizer, witness) and is_bad_witness(optimizer, witness):
            self._publish(self._examiner.examine(optimizer, frame, "gradient", "step"))

    def _look_at_all(self, optimizer: Any, frame: FrameType) -> None:
        """Look at as many gradients as the budget allows, and at weights after the update."""
        self.wants_weights = True
        if self._checks.any_bad_gradient(optimizer):
            self._publish(self._examiner.examine(optimizer, frame, "gradient", "step"))
        self.gradient_norm = self._checks.norm

    def step_ended(self, optimizer: Any, frame: FrameType) -> None:
        """The weights have been touched, with gradients that were looked at."""
        if self._checks.any_bad_weight(optimizer, self.born_bad):
            self._publish(self._examiner.examine(optimizer, frame, "update", "update"))

    def step_skipped(self, scaler: Any, optimizer: Any, frame: FrameType) -> None:
        """GradScaler found infinities among the gradients and left the weights alone. Now and then that is normal."""
        self._settle_pending(frame)
        self.skipped += 1
        self._skipped_bad = self._skipped_bad + 1 if self.losses.last_is_bad else 0
        self.cleared()
        if self._skipped_bad >= _MAX_SKIPPED_BAD:
            self._publish(self._examiner.examine(optimizer, frame, "loss", "step"))
        elif self.skipped >= _MAX_SKIPPED:
            self.lowest_scale = float(scaler.get_scale())
            self._publish(self._examiner.examine(optimizer, frame, "scale", "step"))

    def _settle_pending(self, frame: FrameType) -> None:
        """Read the losses that were copied; a device that fails on the way is reported."""
        if not self.losses.late.are_coming:
            return
        try:
            self.losses.arrived()
        except Exception as error:
            if not async_devices.is_device_error(error):
                raise
            self.device_failed(error, frame)

    def device_failed(self, error: BaseException, frame: FrameType) -> None:
        """The device is lost: report it once, and ask it for nothing more."""
        self.on = False
        if not async_devices.device_is_lost():
            async_devices.died(self.losses.late.belongings(), self.late_norms, self._rewind.originals())
            self._examiner.device_died(error, frame)

    def _publish(self, finding: Finding | None) -> None:
        self.on = False
        if finding is not None:
            self._examiner.publish(finding)
