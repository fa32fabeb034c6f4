"""Whether the loss, the gradients and the weights are finite, asked so that nothing waits and next to nothing is spent.

The loss is read when backward begins: at once on the CPU; on a device that is read late it is copied to pinned memory
behind an event, and looked at when the optimizer is about to step. Gradients are looked at there too, but only on the
CPU: all of them as long as that stays within a small share of the run's time, else the first and now and then another;
and so are the weights after the step. What a bad gradient does on a late device shows in the next loss; for that the
last calls of backward and a copy of the weights are kept (`past`, `rewind`).

A bad loss on the CPU is examined at once, while its batch is there, but nothing is said before an update is about to
use its gradients: a script may well drop them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from torchmedic.observe import late
from torchmedic.observe.examiner import Examiner, Optimizers
from torchmedic.observe.late_losses import LateLosses, Read
from torchmedic.observe.looks import (
    all_bad,
    finite_rates,
    first_is_bad,
    gradients,
    is_bad,
    is_there,
    kind_of_device,
    leaf_gradients,
    may_be_read,
    with_gradient,
    witness_of,
)
from torchmedic.observe.loss_trends import LossTrends
from torchmedic.observe.past import Past, Pasts
from torchmedic.observe.rewind import Rewind
from torchmedic.observe.time_for_looks import REST, TimeForLooks

_SMALL_ROOT = 4096  # elements of a loss that is looked at whole
_EXAMINED_AHEAD = 2  # bad losses that are examined before it is known whether their gradients are used
_SKIPPED_BAD = 3  # steps in a row that GradScaler skips although the loss itself was bad: no scale helps
_SKIPPED = 25  # steps in a row that GradScaler skips at all


class FiniteWatch:
    """Notices the first step that is about to write NaN or infinity into the weights."""

    def __init__(self, examiner: Examiner, pasts: Pasts, rewind: Rewind) -> None:
        self._examiner = examiner
        self._rewind = rewind
        self.on = True
        self.bad_call: Past | None = None  # the first with a bad loss, of those that are read late
        self.born_bad: set[int] = set()  # weights that were not finite when training began
        self.losses = LossTrends()
        self.last_losses: list[float] = []  # of the last backward
        self.last_key: Any = None
        self.skipped = 0  # steps in a row that GradScaler skipped
        self.lowest_scale: float | None = None
        self._bad_losses = 0  # since the gradients were cleared
        self._last_is_bad = False
        self._is_good = False  # the losses that were read last, on a late device, and no other is under way
        self._finding: Any = None
        self._witness: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None
        self._examined = 0
        self._backwards = 0
        self._steps = 0
        self._skipped_bad = 0
        self._roots: list[weakref.ref[torch.Tensor]] = []
        self._late = LateLosses(pasts)
        self._unscaled: tuple[weakref.ref[torch.Tensor], float] | None = None
        self._seen: set[int] = set()  # optimizers that have stepped
        self._time = TimeForLooks()

    # The loss

    def scaled(self, outputs: Any, result: Any) -> None:
        """GradScaler multiplied a loss: what counts is whether it was finite before."""
        if (
            isinstance(outputs, torch.Tensor)
            and isinstance(result, torch.Tensor)
            and result is not outputs  # a scaler that is switched off
            and outputs.device.type == "cpu"
            and outputs.numel() == 1
        ):
            self._unscaled = (weakref.ref(result), float(outputs.detach().item()))

    @property
    def is_scaled(self) -> bool:
        """Whether the last loss went through a GradScaler."""
        return self._unscaled is not None

    def backward_begins(self, roots: Sequence[torch.Tensor], key: Any, frame: FrameType) -> None:
        self._last_is_bad = False
        self._backwards += 1
        self.last_losses = []
        self.last_key = key
        if self._steps == 0:  # as long as there may be nobody who steps
            self._roots = [weakref.ref(root) for root in roots if isinstance(root, torch.Tensor)]
        for root in roots:
            if not isinstance(root, torch.Tensor) or not root.is_floating_point():
                continue
            size = root.numel()
            kind = "cpu" if root.is_cpu else root.device.type
            if kind in late.devices:
                if size == 1:
                    self._is_good = False
                    if self._late.copy(root, kind, key, frame, self._steps):
                        self._examiner.mark("backward")
            elif kind == "cpu" and size <= _SMALL_ROOT:
                self._look(root, size, key)

    @property
    def is_alarmed(self) -> bool:
        """Whether the last loss was not finite."""
        return self._last_is_bad

    def thin_backward_begins(self, roots: Sequence[torch.Tensor], step: int) -> None:
        """The same in a step of which little is noted: the loss of a late device is kept there for a while."""
        self._last_is_bad = self._is_good = False
        self._backwards += 1
        self.last_losses = []
        for root in roots:
            if not isinstance(root, torch.Tensor) or root.numel() != 1 or not root.is_floating_point():
                continue
            kind = "cpu" if root.is_cpu else root.device.type
            if kind in late.devices:
                self._late.hold(root, step, self._steps)
            elif kind == "cpu":
                self._look(root, 1, self.last_key)

    def keep_loss(self, roots: Sequence[torch.Tensor], step: int) -> None:
        """The same where the loss of the step before was kept, and nothing else has happened since."""
        self._backwards += 1
        for root in roots:
            if root.numel() == 1 and root.is_floating_point() and root.device.type in late.devices:
                self._late.hold(root, step, self._steps)

    @property
    def holds_losses(self) -> bool:
        """Whether losses wait on a late device, so that weights there are not looked at either."""
        return self._late.are_held

    def takes_on_trust(self) -> bool:
        """Whether nothing can be known now, in a step of which little is noted: its loss is kept on a late device."""
        if not self._late.are_held or self._late.are_coming or self._bad_losses:
            return False
        self._steps += 1
        return True

    def _look(self, root: torch.Tensor, size: int, key: Any) -> None:
        if size != 1:
            self._last_is_bad |= is_bad(root)
        else:
            unscaled = self._unscaled
            is_scaled = unscaled is not None and unscaled[0]() is root
            loss = unscaled[1] if unscaled is not None and is_scaled else float(root.item())
            self._note_loss(loss, key)
            self._last_is_bad |= not math.isfinite(loss)
        self._bad_losses += self._last_is_bad

    def _note_loss(self, loss: float, key: Any) -> None:
        self.last_losses.append(loss)
        self.losses.note(loss, key)

    def backward_ended(self, frame: FrameType, clock: Optimizers, stepping: Any) -> None:
        """Backward is over.

        Args:
            frame: Somewhere below the user's call.
            clock: Knows the optimizers that there are.
            stepping: The optimizer whose step is under way: backward was called by a closure.
        """
        has_optimizers = clock.optimizer_count > 0
        if not self._last_is_bad and stepping is None and has_optimizers:
            return  # nearly always; the gradients are looked at when they are used
        if self._last_is_bad:
            self._witness = witness_of(clock.optimizers)
        used = stepping is not None or (self._steps == 0 and (not has_optimizers or self._backwards > 2))
        if self._last_is_bad and self._unscaled is None:
            if self._finding is None and (used or self._examined < _EXAMINED_AHEAD):
                self._examined += 1
                self._finding = self._examiner.examine(stepping, frame, "loss", "backward")
            if used and self._finding is not None:
                self._publish(self._finding)
        elif not has_optimizers and self._late.are_coming:
            self._look_back(frame)
        elif stepping is not None and may_be_read(stepping) and self._time.any_bad(gradients(stepping)):
            self._publish(self._examiner.examine(stepping, frame, "gradient", "backward"))
        elif not has_optimizers and self._time.is_left and self._time.any_bad(leaf_gradients(self._roots)):
            # Nobody will step: the loop updates its weights by hand.
            self._publish(self._examiner.examine(None, frame, "gradient", "backward"))

    def _look_back(self, frame: FrameType) -> None:
        """Nobody will step, and the device is read late: look at the losses that have arrived by now."""
        while (read := self._late.first_arrived()) is not None:
            self._take(read)
            if self._last_is_bad:
                self._publish(self._examiner.examine(None, frame, "loss", "backward"))
                return

    def cleared(self) -> None:
        """The gradients of what was suspected are gone."""
        self._bad_losses = 0
        self._finding = None
        self._late.forget()

    # The gradients

    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        """The weights are about to be touched: the last moment at which the step can be replayed as it was."""
        kind = kind_of_device(optimizer)
        is_late = kind in late.devices
        if is_late and not late.devices[kind].may_work():
            return  # a graph is being captured: this is no step yet
        self._settle_pending(frame)
        if not self.on:
            return
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            self.born_bad |= all_bad(with_gradient(optimizer), at_once=is_late)
        self._steps += 1
        self.skipped = self._skipped_bad = 0
        suspect, finding = self._bad_losses > 0, self._finding
        kept = self._last_is_bad or is_there(self._witness)
        self.cleared()
        if not finite_rates(optimizer):
            self._publish(self._examiner.examine(optimizer, frame, "rate", "step"))
        elif suspect:
            if kept or any(is_bad(gradient) for gradient in gradients(optimizer)):
                self._publish(finding or self._examiner.examine(optimizer, frame, "loss", "step"))
        elif is_late:
            self._examiner.mark("update")
            if self._is_good:
                self._rewind.offer(optimizer, *self._examiner.usual_step())
        elif kind == "cpu" and (
            self._time.any_bad(gradients(optimizer)) if self._time.is_due() else first_is_bad(optimizer)
        ):
            self._publish(self._examiner.examine(optimizer, frame, "gradient", "step"))

    def step_ended(self, optimizer: Any, frame: FrameType) -> None:
        """The weights have been touched, with gradients that were looked at."""
        if not may_be_read(optimizer) or (not self._time.is_left and self._steps % REST):
            return
        weights = [tensor for tensor in with_gradient(optimizer) if id(tensor) not in self.born_bad]
        if self._time.any_bad(weights):
            self._publish(self._examiner.examine(optimizer, frame, "update", "update"))

    def step_skipped(self, scaler: Any, optimizer: Any, frame: FrameType) -> None:
        """GradScaler found infinities among the gradients and left the weights alone. Now and then that is normal."""
        self._settle_pending(frame)
        self.skipped += 1
        self._skipped_bad = self._skipped_bad + 1 if self._last_is_bad else 0
        self.cleared()
        if self._skipped_bad >= _SKIPPED_BAD:
            self._publish(self._examiner.examine(optimizer, frame, "loss", "step"))
        elif self.skipped >= _SKIPPED:
            self.lowest_scale = float(scaler.get_scale())
            self._publish(self._examiner.examine(optimizer, frame, "scale", "step"))

    def _settle_pending(self, frame: FrameType) -> None:
        """Read the losses that were copied."""
        if not self._late.are_coming:
            return
        try:
            arrived = self._late.arrived()
        except Exception as error:
            if not late.is_device_error(error):
                raise
            self.device_failed(error, frame)
            return
        self._is_good = True
        for read in arrived:
            self._take(read)

    def _take(self, read: Read) -> None:
        self._note_loss(read.loss, read.key)
        read.call.loss = read.loss
        is_bad_loss = not math.isfinite(read.loss)
        if read.was_held:
            # What counts is where the bad ones began that go on to the present; others were dropped by the script.
            self.bad_call = (self.bad_call or read.call) if is_bad_loss else None
            return
        self._last_is_bad = is_bad_loss
        if is_bad_loss:
            self._bad_losses += 1
            self._is_good = False
            self.bad_call = self.bad_call or read.call

    def device_failed(self, error: BaseException, frame: FrameType) -> None:
        """The device is lost: say so once, and ask it for nothing more."""
        self.on = False
        if not late.is_dead():
            late.died(self._late.belongings(), self._rewind.originals())
            self._examiner.device_died(error, frame)

    def _publish(self, finding: Any) -> None:
        self.on = False
        if finding is not None:
            self._examiner.publish(finding)
