"""The first random number of each pass over the data: if it is the same again, the generator was set back.

A DataLoader draws a number of 63 bits for its workers at the beginning of each pass, from the generator that then gives
the order of the items, dropout and noise. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from torchmedic.contained import pass_signals_on
from torchmedic.source.spots import Place

SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_MIN_PASSES = 3


class Repetition(NamedTuple):
    """Passes in a row that began with the same random number; `place` asked for the first batch of the last one."""

    passes: int
    place: Place


class _Pass:
    """A pass over one dataset, and how many before it in a row were like it."""

    def __init__(self, seed: int, owners: frozenset[int], updates: int) -> None:
        self.seed = seed
        self.owners = owners
        self.updates = updates  # before it
        self.has_trained = False
        self.count = 1


class Passes:
    """The passes over the data."""

    def __init__(self) -> None:
        self.on = False
        self.found: Repetition | None = None
        self._passes: dict[int, _Pass] = {}  # the last one of each dataset, by its number
        self._last: _Pass | None = None

    def begins(self, iterator: Any, dataset: int, updates: int, optimizers: Iterable[int], place: Place) -> bool:
        """A pass begins; whether it is now known that the random numbers repeat.

        Args:
            iterator: Of the DataLoader.
            dataset: Its number.
            updates: So far.
            optimizers: The numbers of those that there are. A new one may begin another training.
            place: The line that asks.
        """
        if self._last is not None:
            self._last.has_trained = updates > self._last.updates
        sampler = getattr(iterator._index_sampler, "sampler", None)
        seed = getattr(iterator, "_base_seed", None)
        is_random = type(sampler) in SHUFFLING and getattr(sampler, "generator", None) is None
        if not is_random or not isinstance(seed, int) or iterator._persistent_workers:
            self._last = None
            return False
        now, before = _Pass(seed, frozenset(optimizers), updates), self._passes.get(dataset)
        if before is not None and before.has_trained and (before.seed, before.owners) == (seed, now.owners):
            now.count += before.count
        self._last = self._passes[dataset] = now
        if now.count < _MIN_PASSES or not now.owners or not place.line:
            return False
        self.found = Repetition(now.count, place)
        self.on = False
        return True


def length_of(sampler: Any) -> int | None:
    """The batches of a sampler; None where it has no end."""
    try:
        return len(sampler)
    except Exception as error:  # a sampler without an end has no length, and that of the user may raise anything
        pass_signals_on(error)
        return None
