"""The time budget of finite checks: a small share of the time that training takes."""

from __future__ import annotations

from time import monotonic, perf_counter

import torch

from torchmedic.observe.numbers.finite_checks import is_bad

_FREE_SECONDS = 0.05  # that may be spent in any case
_SHARE_OF_TIME = 0.002  # since training began, beyond that
REST = 16  # looks, of which one goes beyond the first tensor when the time is used up


class CheckBudget:
    """Checks tensors, all of them or some, as the budget allows."""

    def __init__(self) -> None:
        self._started = monotonic()
        self._spent = 0.0
        self._turn = 0
        self.was_left = True  # time, when it was last asked whether a look is due

    @property
    def is_left(self) -> bool:
        return self._spent < _FREE_SECONDS + _SHARE_OF_TIME * (monotonic() - self._started)

    def is_due(self) -> bool:
        """Whether there is time for more than a look at the first tensor."""
        self._turn += 1
        self.was_left = self._spent < _FREE_SECONDS + _SHARE_OF_TIME * (monotonic() - self._started)
        return self.was_left or self._turn % REST == 0

    def any_bad(self, tensors: list[torch.Tensor]) -> bool:
        """Whether some tensors are not finite; only two of them are checked once the budget is used up."""
        if not tensors:
            return False
        started = perf_counter()
        looked_at = tensors if self.is_left else [tensors[0], tensors[self._turn // REST % len(tensors)]]
        bad = any(is_bad(tensor) for tensor in looked_at)
        self._spent += perf_counter() - started
        return bad
