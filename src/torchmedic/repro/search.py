"""The state of the search for a smaller program: the best one so far, and the remaining budget."""

from __future__ import annotations

import time
from typing import NamedTuple

from torchmedic.repro.program import Program


class Budget(NamedTuple):
    """The maximum number of trials, and of seconds."""

    queries: int = 400
    seconds: float = 10.0


class Shrinker:
    """Keeps the smallest program so far. With `enough`, the search ends at a program of so many bytes."""

    def __init__(self, program: Program, budget: Budget, enough: int | None = None) -> None:
        self.best = program
        self.queries = budget.queries
        self._deadline = time.monotonic() + budget.seconds
        self._enough = enough

    @property
    def is_over(self) -> bool:
        if self._enough is not None and self.best.bytes <= self._enough:
            return True
        return self.queries <= 0 or time.monotonic() > self._deadline

    def offer(self, candidate: Program | None) -> bool:
        """Keep a candidate if it still fails."""
        if candidate is None or not self.still_fails(candidate):
            return False
        self.best = candidate
        return True

    def still_fails(self, candidate: Program) -> bool:
        """Whether a candidate still fails; False without a trial if the search is over."""
        if self.is_over:
            return False
        self.queries -= 1
        return candidate.holds()
