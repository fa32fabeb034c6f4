"""Whether updates change the weights at all, and how far the learning rate falls: a few looks at each optimizer.

Looks come after 1, 4, 20, 36 and 60 steps, then each after half as many steps again; any other step costs one
comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmedic.contained import contained
from torchmedic.observe.loop.optimizer_looks import FIRST_LOOKS, Steady, rates_of

_NEVER = 1 << 62
_OPEN_STEPS = 8  # steps in which a look waits for the other optimizers
_MAX_OPTIMIZERS = 8


class Standstill:
    """Fed by the hooks.

    Args:
        ask: Called when something new is known.
        look_anew: Called when parameters that had gradients have none: the loss may belong to another model now.
        looked: Called when a look is over, with its step.
    """

    def __init__(
        self, ask: Callable[[], None], look_anew: Callable[[], None], looked: Callable[[int], None] = lambda _: None
    ) -> None:
        self._looked = looked
        self._ask = ask
        self._look_anew = look_anew
        self.due = _NEVER  # the step of the next look; read by the hooks
        self.watched: dict[int, Steady] = {}
        self.updates = 0  # of the whole run, known at its end
        self.is_loss_still = False  # at the end
        self._open = 0  # the step at which the present look began
        self._seen: set[int] = set()  # optimizers that this look has seen

    def start(self) -> None:
        self.due = FIRST_LOOKS[0]

    def stop(self) -> None:
        """Stop for good."""
        self.due = _NEVER
        self.watched.clear()

    @contained("observe.habits")
    def stepped(self, optimizer: Any, step: int) -> None:
        """An optimizer has stepped while a look is due."""
        self._open = self._open or step
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            known = self._known(optimizer)
            if known is not None and known.look(step):
                self._ask()
            if known is not None and known.lost_gradients():
                self._look_anew()
        if step >= self._open + _OPEN_STEPS or len(self._seen) >= len(self.watched) == 1:
            self._close(step)

    def ending(self, step: int, *, is_loss_still: bool = False) -> None:
        """The run ends after this many steps: the last rates are the present ones."""
        self.updates, self.is_loss_still = step, is_loss_still
        for known in self.watched.values():
            rates = rates_of(known.reference())
            if rates and known.rates and step > known.rates[-1].step:
                known.note_rate(step, max(rates))

    def of(self, optimizer: Any) -> Steady | None:
        known = self.watched.get(id(optimizer))
        return known if known is not None and known.reference() is optimizer else None

    def rate_is_explained(self, optimizer: Any) -> None:
        """Another finding explains why the rate of an optimizer falls."""
        known = self.of(optimizer)
        if known is not None:
            known.has_judged_rates = True

    def _close(self, step: int) -> None:
        self._looked(step)
        self._open = 0
        self._seen.clear()
        later = [each for each in FIRST_LOOKS if each > step]
        self.due = later[0] if later else step + step // 2

    def _known(self, optimizer: Any) -> Steady | None:
        known = self.of(optimizer)
        if known is None:
            if len(self.watched) >= _MAX_OPTIMIZERS or not type(optimizer).__module__.startswith("torch.optim"):
                return None  # an optimizer of somebody else's may keep its updates for later
            known = self.watched[id(optimizer)] = Steady(optimizer)
        return known
