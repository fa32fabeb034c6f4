"""The plan of a step: which saved tensors go, the cheapest ones first. Copies beside the computation cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.recovery.patterns import Pattern

_CHEAP_SHARE = 0.25  # of the time of a copy: a recipe that takes no more is preferred to any copy
_LATE_SHARE = 0.2  # of the bytes of a step, at its end
_SOON = 24  # saved tensors after one that is copied: backward starts to bring the copy back where it comes to them
MAX_DEPTH = 2  # of tensors that must be computed again for one tensor


class SavedIn(NamedTuple):
    """A saved tensor of a step."""

    node: int  # in the step
    name: str  # of the attribute
    position: int  # in the attribute


class Candidate(NamedTuple):
    """A storage that a step saves, with the prices of its absence."""

    number: int  # of the first saved tensor in it, among those of the step
    nbytes: int
    recipe_seconds: float | None
    copy_seconds: float
    pattern: Pattern | None = None
    sources: tuple[int, ...] = ()  # numbers of the saved tensors that the recipe needs


class Task(NamedTuple):
    """What is done with a saved tensor of a step."""

    saved: SavedIn
    nbytes: int  # of the storage, if it goes; 0 if the storage has gone before, or stays
    pattern: Pattern | None
    freed: int | None  # where copies begin to be brought back: bytes that backward has freed when it comes here


class Plan:
    """Which saved tensors of a step go, by their numbers."""

    def __init__(
        self,
        candidates: list[Candidate],
        budget: int,
        hidden_seconds: float,
        again: dict[int, int] | None = None,
        saved: dict[int, SavedIn] | None = None,
    ) -> None:
        """Choose the tensors.

        Args:
            candidates: In the order of the step.
            budget: The bytes that must go.
            hidden_seconds: The time that copies may take without a cost.
            again: Saved tensors whose storage was saved before, and the number of the first.
            saved: All saved tensors.
        """
        self.dropped: dict[int, int] = {}  # bytes by number
        self.copied: dict[int, int] = {}
        self._left = budget
        self._sources = {each.number: each.sources for each in candidates}
        priced = _by_price(candidates)
        self._drop(each for seconds, each in priced if seconds <= _CHEAP_SHARE * each.copy_seconds)
        self._copy(candidates, hidden_seconds)
        self._drop(each for seconds, each in priced if seconds <= each.copy_seconds)
        self._copy(candidates, float("inf"))
        self.tasks = list(self._tasks(candidates, again or {}, saved or {}))

    def _tasks(self, candidates: list[Candidate], again: dict[int, int], saved: dict[int, SavedIn]) -> Iterator[Task]:
        gone = {**self.dropped, **self.copied}
        patterns = {each.number: each.pattern for each in candidates}
        stays = {each.number: each.nbytes for each in candidates if each.number not in gone}
        freed, free = {}, 0
        for number in sorted(saved, reverse=True):
            freed[number] = free
            free += stays.get(number, 0)
        last_copied = -_SOON
        for number, each in sorted(saved.items()):
            if number in self.copied:
                last_copied = number
            is_ahead = number - last_copied < _SOON
            if is_ahead or number in gone or again.get(number) in gone:
                pattern = patterns.get(number) if number in self.dropped else None
                yield Task(each, gone.get(number, 0), pattern, freed[number] if is_ahead else None)

    def _drop(self, candidates: Iterator[Candidate]) -> None:
        self._take((each for each in candidates if self._depth(each.number) < MAX_DEPTH), self.dropped, float("inf"))

    def _depth(self, number: int) -> int:
        """How many tensors must be computed one after the other before a tensor can be."""
        return max((1 + self._depth(each) for each in self._sources[number] if each in self.dropped), default=0)

    def _copy(self, candidates: list[Candidate], seconds: float) -> None:
        """Copy tensors, those first that backward needs last, as long as the copies take no more time."""
        self._take(iter(candidates), self.copied, seconds)

    def _take(self, candidates: Iterator[Candidate], taken: dict[int, int], seconds: float) -> None:
        for each in candidates:
            if self._left <= 0:
                return
            if each.number in self.dropped or each.number in self.copied:
                continue
            seconds -= each.copy_seconds
            if seconds < 0:
                return
            taken[each.number] = each.nbytes
            self._left -= each.nbytes


def _by_price(candidates: list[Candidate]) -> list[tuple[float, Candidate]]:
    """The tensors that can be computed again, with the seconds that takes: the cheapest for a byte first.

    The last ones of a step come last. Backward needs them first, when memory is still full.
    """
    late = (1 - _LATE_SHARE) * sum(each.nbytes for each in candidates)
    found, before = [], 0
    for each in candidates:
        if each.recipe_seconds is not None:
            found.append((before >= late, each.recipe_seconds / max(each.nbytes, 1), each))
        before += each.nbytes
    found.sort(key=lambda item: item[:2])
    return [(each.recipe_seconds or 0.0, each) for _, _, each in found]
