"""When to ask why a loss is finite and much too large, and when to tell the answer."""

from __future__ import annotations

from collections.abc import Callable

from torchmedic.observe.numbers.step_memory import StepMemory
from torchmedic.observe.stages import Finding

_UPDATES_WITHOUT_HOPE = 24  # in a row with a loss that is far too large, after which nobody waits for a recovery


class GrowthQuestion:
    """Asks when the loss has left its level, when it is lost, and when it has been far from its level for long."""

    def __init__(self, memory: StepMemory) -> None:
        self._memory = memory
        self._is_asked_early = False
        self._is_asked = False
        self._is_asked_for_long = False
        self._early: Finding | None = None  # told only if the run ends so, or the loss has not come back for long
        self._tentative: Finding | None = None  # told only if the loss does not recover

    def answer(self, examine: Callable[[], Finding | None]) -> Finding | None:
        """What is to be told now, after an update was noted; `examine` runs the last updates again."""
        memory = self._memory
        is_new = memory.is_lost and not self._is_asked
        is_new_for_long = memory.is_far and not self._is_asked_for_long
        if not is_new and not is_new_for_long:
            if memory.has_left and not self._is_asked_early:
                self._is_asked_early = True
                early = examine()
                # Without what was recorded: the run goes on, and its objects shall not live longer.
                self._early = Finding(early.diagnosis, is_tentative=early.is_tentative) if early else None
            return self._settled() if self._tentative is not None else None
        self._is_asked, self._is_asked_for_long = memory.is_lost, memory.is_far
        early = self._early if is_new_for_long and memory.has_left else None
        found = examine() if early is None else early
        if is_new_for_long:
            memory.forget_far()
        elif found is not None and found.is_tentative:
            self._tentative = found
            return None
        return found

    def last_word(self) -> Finding | None:
        """What is to be told because the run ends, and the loss has not come back."""
        early = self._early
        return early if self._memory.has_left and early is not None and not early.is_tentative else None

    def _settled(self) -> Finding | None:
        """The tentative answer, once training is not expected to recover."""
        if not self._memory.lost_updates:
            self._tentative = None
        return self._tentative if self._memory.lost_updates >= _UPDATES_WITHOUT_HOPE else None
