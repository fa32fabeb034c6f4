"""What is taken out of memory early in the next steps, learned from what had to be parked in the steps before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torchmedic.records.recovery import Means, RecoveryPhase
from torchmedic.recovery.early_spill import EarlySpill

_CALM_UPDATES = 100  # without an out-of-memory, after which less is taken out
_MIN_BUDGET_BYTES = 1 << 20
_PRESSED_SHARE = 0.15  # of the budget, by which it grows while the allocator has to look for memory in every step
_MIN_PRESSED_BYTES = 128 << 20
_MAX_GROWTH_BYTES = 1 << 30  # of the budget, beyond twice its size, after a step that was computed with all of it out


class Splits(Protocol):
    """Calls that are made in parts."""

    @property
    def are_kept(self) -> bool: ...

    def take_less(self) -> None: ...


class NextSteps:
    """Saved tensors and optimizer state that do not stay in memory, as long as memory is short."""

    def __init__(self, early_spill: Callable[[int], EarlySpill], splits: Splits | None = None) -> None:
        self._early_spill = early_spill  # takes so many bytes of saved tensors out in each step
        self._splits = splits
        self.early: EarlySpill | None = None
        self.optimizer_bytes = 0  # of state to park after each update, as the passes after it have no room
        self._state_parked_in_step = self._state_parked_before = False
        self.parked_in_step = 0  # bytes of saved tensors, beside those that go early
        self._whole_step = 0  # bytes that were out of memory when the step was computed again
        self._calm = 0
        self._calm_wanted = _CALM_UPDATES
        self._has_taken_less = False

    @property
    def budget(self) -> int:
        """The bytes of saved tensors that go in each step."""
        return 0 if self.early is None else self.early.budget

    @property
    def are_short(self) -> bool:
        return (
            self.early is not None or bool(self.optimizer_bytes) or (self._splits is not None and self._splits.are_kept)
        )

    def recovered(self, phase: RecoveryPhase, means: Means, nbytes: int) -> None:
        """Memory has run out, and so many bytes were taken out of it."""
        self._calm = 0
        if means in ("split", "random split"):
            self._calm_wanted *= 1 + self._has_taken_less
        if means in ("activations", "kernel"):  # a workspace that was refused was missing, too
            self.parked_in_step += nbytes
        elif means == "optimizer" and phase != "update":
            self._state_parked_in_step = True
            if self._state_parked_before:  # once can be the time before enough saved tensors go
                self.optimizer_bytes = max(self.optimizer_bytes, nbytes)
        elif means == "recompute":  # the whole step was computed with so much out of memory
            self._whole_step = min(nbytes, 2 * self.budget + _MAX_GROWTH_BYTES)

    def was_pressed(self) -> None:
        """Memory was enough for the step, but so little was free that the allocator had to wait for the device."""
        if self.early is not None:
            self.parked_in_step += max(int(_PRESSED_SHARE * self.budget), _MIN_PRESSED_BYTES)

    def plan(self, saved_elsewhere: int) -> bool:
        """A step is over: more goes in the next one if more had to, less after many calm steps.

        Args:
            saved_elsewhere: Bytes that the next step does not need any more, for other reasons.

        Returns:
            Whether other tensors than before go.
        """
        wanted = max(self.budget + max(self.parked_in_step - saved_elsewhere, 0), self._whole_step)
        self.parked_in_step = self._whole_step = 0
        self._state_parked_before |= self._state_parked_in_step
        if wanted > self.budget:
            if self.early is None:
                self.early = self._early_spill(wanted)
            else:
                self.early.budget = wanted
                self._calm_wanted *= 1 + self._has_taken_less
        elif self.are_short:
            self._calm += 1
            if self._calm >= self._calm_wanted:
                self._take_less()
        if self.early is None:
            return False
        return self.early.next_step()

    def _take_less(self) -> None:
        self._calm = 0
        self._has_taken_less = True
        self.optimizer_bytes //= 2
        if self._splits is not None:
            self._splits.take_less()
        if self.early is not None:
            self.early.budget //= 2
            if self.early.budget < _MIN_BUDGET_BYTES:
                self.early = None
