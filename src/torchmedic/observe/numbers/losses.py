"""The losses that backward is called with: whether they are finite, and what they were.

On the CPU a loss is read when backward begins; on a device that is read late it is copied to pinned memory, and looked
at when the optimizer is about to step (`late_losses`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import inf, isfinite
from types import FrameType
from typing import Any

import torch

from torchmedic.observe.device import async_devices
from torchmedic.observe.numbers.kept_steps import KeptBackward, KeptBackwards
from torchmedic.observe.numbers.late_losses import LateLosses, Read
from torchmedic.observe.numbers.step_memory import StepMemory
from torchmedic.source.objects.finite import has_values, is_finite, plain

_MAX_ROOT_ELEMENTS = 4096  # elements of a loss that is looked at whole
_TREND_STEPS = 100
_MAX_KEPT = 256  # losses of a line: those of a stretch of short steps, and of backward calls inside them
_MAX_TRENDS = 16  # lines that call backward
_NOTED_AFTER_ALARM = 32  # steps
_LOOK_EVERY = 32  # backward calls, at least
_FIRST_LOSSES = 8
_LAST_LOSSES = 32
_STILL = 0.95  # times the first losses
_Tensor = torch.Tensor


class LossTrends(dict[Any, deque[float]]):
    """The last losses by the line that calls backward: whether training was diverging before it broke."""

    def note(self, losses: Sequence[float], key: Any) -> None:
        known = self.get(key)
        if known is None:
            if len(self) >= _MAX_TRENDS:
                return
            known = self[key] = deque(maxlen=_MAX_KEPT)
        known.extend(losses)


class Glances:
    """Reads the loss of nearly every backward call of short steps, and touches no object but itself and the loss."""

    __slots__ = ("_alarm", "_ceiling", "_floor", "count", "trend")

    def __init__(self, alarm: Callable[[], None]) -> None:
        self._alarm = alarm  # is called where a loss is worth a closer look
        self.begin(inf, None)

    def begin(self, ceiling: float, trend: deque[float] | None) -> None:
        self._floor, self._ceiling = -ceiling, ceiling
        self.trend = trend  # takes the losses; None: there is nothing to be read at once
        self.count = 0  # of the losses that were read

    def look(self, roots: Sequence[torch.Tensor]) -> bool:
        """Whether the only loss is an ordinary one; False also where that has to be found out in another way."""
        trend = self.trend
        if trend is None or len(roots) != 1:
            return False
        root = roots[0]
        if type(root) is not _Tensor or not root.is_cpu:
            return False
        try:
            loss = root.item()
        except RuntimeError:  # more than one element
            return False
        if type(loss) is float and self._floor < loss < self._ceiling:
            trend.append(loss)
            self.count += 1
            return True
        self._alarm()
        return False


class Losses:
    """Notes every loss; `FiniteWatch` calls it."""

    def __init__(
        self,
        kept_backwards: KeptBackwards,
        memory: StepMemory,
        mark: Callable[[str], None],
    ) -> None:
        self._mark = mark
        self.ceiling = inf  # the size of a loss that is worth a closer look
        self.alarm = 0  # steps that are noted in full because of one
        self._memory = memory  # keeps backward calls whose loss is read at once
        self.call: KeptBackward | None = None  # the last backward that was noted in full
        self.trends = LossTrends()
        self.glances = Glances(self._alarmed)
        self.last: list[float] = []  # of the last backward
        self.key: Any = None  # of the call of backward that was last noted in full
        self.late = LateLosses(kept_backwards)
        self.bad_call: KeptBackward | None = None  # the first with a bad loss, of those that are read late
        self.bad = 0  # since the gradients were cleared
        self.last_is_bad = False
        self.is_good = False  # what was read last, on a late device, and no other is under way
        self.backwards = 0
        self._is_look = False  # the last backward is one at which to find out whether there is time to keep some again
        self._next_look = _LOOK_EVERY
        self.are_scaled_late = False  # losses of a late device are read with the factor of a GradScaler in them
        self._began_above = 0.0  # the largest of the first losses, if all were above zero
        self._unscaled: tuple[weakref.ref[torch.Tensor], float] | None = None

    def scaled(self, outputs: Any, result: Any) -> None:
        """GradScaler multiplied a loss: what counts is whether it was finite before."""
        if not isinstance(outputs, torch.Tensor) or not isinstance(result, torch.Tensor):
            return
        if result is outputs:
            return  # a scaler that is switched off
        if outputs.device.type != "cpu":
            self.are_scaled_late = True
        elif outputs.numel() == 1:
            self._unscaled = (weakref.ref(result), float(outputs.detach().item()))
            self.end_stretch()

    def _alarmed(self) -> None:
        self.alarm = _NOTED_AFTER_ALARM

    @property
    def is_scaled(self) -> bool:
        """Whether the last loss went through a GradScaler."""
        return self._unscaled is not None

    @property
    def recent(self) -> Sequence[float]:
        """The last losses at the line that last called backward."""
        return list(self.trends.get(self.key, ()))[-_TREND_STEPS:]

    def have_sunk(self, *, is_first: bool) -> bool:
        """Whether the losses of the only line that calls backward began above zero, and are all below it now.

        A loss that is further below zero than it was above runs away: the question about growth proves why.

        Args:
            is_first: Whether this is asked for the first time: the first losses are known only then.
        """
        known = self._only_trend
        if is_first:
            is_known = 0 < len(known) < _MAX_KEPT and min(known[:_FIRST_LOSSES]) > 0
            self._began_above = max(known[:_FIRST_LOSSES]) if is_known else 0.0
        last = known[-_LAST_LOSSES:]
        return len(last) >= _LAST_LOSSES and max(last) < 0 and -min(last) < self._began_above

    @property
    def stand_still(self) -> bool:
        """Whether the losses of the only line that calls backward are about as large as the first ones were."""
        known = self._only_trend
        if not _FIRST_LOSSES + _LAST_LOSSES <= len(known) < _MAX_KEPT:
            return False
        first, last = sum(known[:_FIRST_LOSSES]) / _FIRST_LOSSES, sum(known[-_LAST_LOSSES:]) / _LAST_LOSSES
        return last > _STILL * first > 0

    @property
    def _only_trend(self) -> list[float]:
        """The losses of the only line that calls backward; empty where there are several, or a factor in them."""
        return list(next(iter(self.trends.values()))) if len(self.trends) == 1 and not self.is_scaled else []

    def begin(self, roots: Sequence[torch.Tensor], key: Any, frame: FrameType, update: int) -> None:
        """A backward begins in a step that is noted in full."""
        if self.alarm:
            self.alarm -= 1
        self.last_is_bad = False
        self.backwards += 1
        self._is_look = self.backwards >= self._next_look
        if self._is_look:
            self._next_look = self.backwards + _LOOK_EVERY
        self.last = []
        self.key = key
        call: KeptBackward | None = None
        for given in roots:
            root = _readable(given)
            if root is None:
                continue
            size = root.numel()
            kind = "cpu" if root.is_cpu else root.device.type
            if kind in async_devices.devices:
                if size == 1:
                    self.is_good = False
                    kept = self.late.copy(root, kind, key, frame, update)
                    if kept is not None:
                        call = kept
                        self._mark("backward")
            elif kind == "cpu" and size <= _MAX_ROOT_ELEMENTS:
                self._look(root, size, given)
                if size == 1 and call is None and (self._memory.is_open or self._is_look):
                    call = self._memory.record(frame, update)
                    if call is not None:
                        call.loss = self.last[-1]
        self.call = call

    def begin_sampled_out(self, roots: Sequence[torch.Tensor], step: int, update: int) -> None:
        """A backward begins in a short step that is sampled out: a late device keeps its loss for a while."""
        self.end_stretch()
        self.last_is_bad = self.is_good = self._is_look = False
        self.backwards += 1
        self.last = []
        for given in roots:
            root = _readable(given)
            if root is None or root.numel() != 1:
                continue
            kind = "cpu" if root.is_cpu else root.device.type
            if kind in async_devices.devices:
                self.late.hold(root, step, update)
            elif kind == "cpu":
                self._look(root, 1, given)

    def last_of_steps(self, count: int, before: int, after: int) -> list[float]:
        """The last loss of each of some steps in a row; empty if not all have called backward equally often.

        Args:
            count: How many steps.
            before: Calls of backward up to the first of them.
            after: Calls of backward since the last of them.
        """
        calls = self.backwards - before - after
        known = list(self.trends.get(self.key, ()))
        known = known[: len(known) - after]
        if calls % count or not count <= calls <= len(known):
            return []
        return known[len(known) - calls :][calls // count - 1 :: calls // count]

    def is_ordinary(self) -> bool:
        """Whether nothing about the last loss is worth a closer look."""
        loss = self.last[-1] if self.last else 0.0
        return -self.ceiling < loss < self.ceiling and not self._is_look

    def hold(self, roots: Sequence[torch.Tensor], step: int, update: int) -> bool:
        """Fast path of `begin_sampled_out` on a late device; False: take the full path."""
        if len(roots) != 1 or self._unscaled is not None:
            return False
        root = roots[0]
        if type(root) is not _Tensor:
            return False
        if (root.get_device(), root.dtype) != self.late.place or root.numel() != 1:
            return False
        self.late.hold(root, step, update)
        self.backwards += 1
        return True

    def begin_stretch(self) -> None:
        """Only `glances`, or `hold` on a late device, are asked from now on."""
        is_read = self._unscaled is None and "cpu" not in async_devices.devices
        self.glances.begin(self.ceiling, self.trends.get(self.key) if is_read else None)

    def end_stretch(self) -> None:
        """Account for the losses that were glanced at."""
        glances = self.glances
        if glances.count and glances.trend:
            self.backwards += glances.count
            self.last = [glances.trend[-1]]
        glances.begin(inf, None)

    def _look(self, root: torch.Tensor, size: int, given: torch.Tensor) -> None:
        if size != 1:
            self.last_is_bad |= not is_finite(root)
        else:
            unscaled = self._unscaled
            is_scaled = unscaled is not None and unscaled[0]() is given
            loss = unscaled[1] if unscaled is not None and is_scaled else float(root.item())
            self._note([loss], self.key)
            self.last_is_bad |= not isfinite(loss)
        self.bad += self.last_is_bad

    def _note(self, losses: Sequence[float], key: Any) -> None:
        self.last += losses
        self.trends.note(losses, key)

    def arrived(self) -> None:
        """Read the losses that were copied."""
        arrived = self.late.arrived()
        self.is_good = True
        if arrived:
            self._take_held(*self.late.arrived_together(), arrived[0].key)
        for read in arrived:
            self.take(read)

    def _take_held(self, losses: list[float], calls: list[KeptBackward], key: Any) -> None:
        """Note losses that were read together, in the order in which they were made."""
        self._note(losses, key)
        for call, loss in zip(calls, losses, strict=True):
            call.loss = loss
        # What counts is where the bad ones began that go on to the present; others were dropped by the script.
        last_good = next((place for place in reversed(range(len(losses))) if isfinite(losses[place])), None)
        if last_good is not None:
            self.bad_call = None
        first_bad = 0 if last_good is None else last_good + 1
        if first_bad < len(calls):
            self.bad_call = self.bad_call or calls[first_bad]

    def take(self, read: Read) -> None:
        """Note a loss that has arrived from its device."""
        self._note([read.loss], read.key)
        read.call.loss = read.loss
        is_bad_loss = not isfinite(read.loss)
        self.last_is_bad = is_bad_loss
        if is_bad_loss:
            self.bad += 1
            self.is_good = False
            self.bad_call = self.bad_call or read.call

    def cleared(self) -> None:
        """The gradients of the bad losses are gone."""
        self.bad = 0
        self.late.forget()


def _readable(root: Any) -> torch.Tensor | None:
    """A loss that can be read, without the methods of a class of the user's; None for anything else."""
    if type(root) is not _Tensor:
        if not isinstance(root, torch.Tensor) or not has_values(root):
            return None
        root = plain(root)
    return root if root.is_floating_point() else None
