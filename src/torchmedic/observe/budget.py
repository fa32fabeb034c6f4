"""The time that checks may take of a run: an account for each kind of check, all of them on one clock.

The shares of the accounts add up to 0.35 % of the run's time, 0.3 % on the CPU. The steps that are noted in full
(`hooks/current_step.py`) take 0.5 % at most beside them. An account begins full. What is not spent is saved only until
the account is full again: a pause, or a phase of cheap steps, does not buy a burst of checks later. An account may be
overdrawn by the last check that it was charged for, and has to recover before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

FULL_SECONDS = {"finite": 0.02, "memory": 0.05, "norms": 0.02, "leaks": 0.1}  # of each account


class Account:
    """What one kind of check may spend, in seconds of the thread that trains."""

    def __init__(self, share: float, full: float, clock: Callable[[], float] = monotonic) -> None:
        self._share = share  # of the time that passes
        self.full = full
        self._clock = clock
        self._left = full
        self._at = clock()
        self.spent = 0.0  # since the beginning

    @property
    def left(self) -> float:
        now = self._clock()
        self._left = min(self.full, self._left + self._share * (now - self._at))
        self._at = now
        return self._left

    def spend(self, seconds: float) -> None:
        self._left -= seconds
        self.spent += seconds


class Budget:
    """The accounts of a process."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        full = FULL_SECONDS
        self.finite = Account(0.001, full["finite"], clock)  # whether gradients and weights are finite
        self.memory = Account(0.001, full["memory"], clock)  # what it takes to run the last updates again
        self.norms = Account(0.0005, full["norms"], clock)  # gradient norms on a device that is read late
        self.leaks = Account(0.001, full["leaks"], clock)  # walks through the objects that the process holds

    def accounts(self) -> dict[str, Account]:
        return dict(vars(self))
