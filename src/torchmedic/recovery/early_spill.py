"""Saved tensors that do not stay in memory, because the steps before ran out of memory with them.

In the first steps, tensors are taken out as they come, and their prices are noted: the time of the call that computes a
tensor again, and the time of its copy. The steps after that follow a plan, which counts the saved tensors of a step and
names those that go. The cheapest ones go first; copies that the forward pass hides cost nothing.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchmedic.observe.saved_hooks import CAN_TELL, top_hooks
from torchmedic.recovery.living_tensors import is_plain, parameter_storages, unseen
from torchmedic.recovery.parking import ParkingSpace
from torchmedic.recovery.places import Place
from torchmedic.recovery.recipes import Recipe, Recipes
from torchmedic.recovery.saved_tensors import MIN_PARKED_BYTES, SavedTensor, SavedTensors, unpack

_CHEAP_SHARE = 0.25  # of the time of a copy: a recipe that takes no more is preferred to any copy
_FORWARD_SHARE = 0.3  # of a step, in which copies run beside the computation
_LATE_SHARE = 0.2  # of the bytes of a step, at its end
_MAX_DEPTH = 3  # of places that must be computed again for one place
_FILE_SECONDS_PER_BYTE = 1e-9
_SOON = 24  # saved tensors after one that is copied: backward starts to bring the copy back where it comes to them
_LEARNING_STEPS = 2


class _Candidate(NamedTuple):
    """A saved tensor of a step, with the prices of its absence."""

    number: int  # among the saved tensors of the step
    nbytes: int
    recipe_seconds: float | None
    copy_seconds: float


class _Plan:
    """Which saved tensors of a step go, by their numbers."""

    def __init__(
        self, candidates: list[_Candidate], budget: int, hidden_seconds: float, again: dict[int, int] | None = None
    ) -> None:
        self.dropped: dict[int, int] = {}  # bytes by number
        self.copied: dict[int, int] = {}
        self._left = budget
        priced = _by_price(candidates)
        self._drop(each for seconds, each in priced if seconds <= _CHEAP_SHARE * each.copy_seconds)
        self._copy(candidates, hidden_seconds)
        self._drop(each for seconds, each in priced if seconds <= each.copy_seconds)
        self._copy(candidates, float("inf"))
        gone = self.dropped.keys() | self.copied.keys()
        self.involved = gone | {number for number, first in (again or {}).items() if first in gone}
        self.last = max([*self.involved, *(number + _SOON for number in self.copied)], default=0)
        self.freed = [0] * (self.last + 1)  # bytes free again when backward comes to a saved tensor, by its number
        stays = {each.number: each.nbytes for each in candidates if each.number not in gone}
        free = 0
        for number in range(max(stays, default=0), -1, -1):
            if number <= self.last:
                self.freed[number] = free
            free += stays.get(number, 0)

    def _drop(self, candidates: Iterator[_Candidate]) -> None:
        self._take(candidates, self.dropped, float("inf"))

    def _copy(self, candidates: list[_Candidate], seconds: float) -> None:
        """Copy tensors, those first that backward needs last, as long as the copies take no more time."""
        self._take(iter(candidates), self.copied, seconds)

    def _take(self, candidates: Iterator[_Candidate], taken: dict[int, int], seconds: float) -> None:
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


def _by_price(candidates: list[_Candidate]) -> list[tuple[float, _Candidate]]:
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


class EarlySpill:
    """Takes saved tensors out of memory as they are saved, up to a number of bytes per step."""

    def __init__(self, saved: SavedTensors, space: ParkingSpace, recipes: Recipes, budget: int) -> None:
        self._saved = saved
        self._space = space
        self._recipes = recipes
        self.budget = budget
        self.spilled = 0  # bytes in this step, both copied and dropped
        self.failed = False
        self._kept = parameter_storages()
        self._places: dict[int, tuple[weakref.ref[Place], StorageWeakRef, int]] = {}
        self._steps = 0
        self._number = 0  # of the saved tensor that comes next
        self._candidates: list[_Candidate] = []
        self._noted: dict[int, tuple[StorageWeakRef, int]] = {}  # storages of the candidates, with their numbers
        self._again: dict[int, int] = {}  # saved tensors whose storage was saved before, and the number of the first
        self._plan: _Plan | None = None
        self._planned_budget = 0
        self._is_overlapped = False  # whether copies are made beside the computation
        self._last_copied = -_SOON
        self._began: float | None = None
        self._is_on = False  # as default hooks, from `start` on

    def next_step(self) -> bool:
        """Plan the next step by the ones before; whether there is a new plan."""
        now = time.perf_counter()
        before = self._plan
        if self._number:
            self._steps += 1
            if self._steps >= _LEARNING_STEPS and (self._plan is None or self._planned_budget != self.budget):
                hidden = (now - self._began) * _FORWARD_SHARE if self._began and self._is_overlapped else 0.0
                self._plan = _Plan(self._candidates, self.budget, hidden, self._again)
                self._planned_budget = self.budget
            elif self._plan is None:
                self._candidates, self._again = [], {}
        self._began = now
        self.spilled = self._number = 0
        self._last_copied = -_SOON
        self._places.clear()
        self._noted.clear()
        self._saved.backward.next_step()
        return self._plan is not before

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        self._saved.note_new()
        plan = self._plan
        saved = None
        if tensor.nbytes >= MIN_PARKED_BYTES and not self.failed and is_plain(tensor):
            self._number = number = self._number + 1
            if plan is None or number in plan.involved:
                saved = self._gone(tensor, number)
            elif number > plan.last:
                self.rest()
        if saved is None:
            saved = SavedTensor(tensor, self._saved.backward)  # can still be parked when memory runs out
        saved.is_ahead = self._number - self._last_copied < _SOON
        if plan is not None and self._number <= plan.last:
            saved.freed = plan.freed[self._number]
        return saved

    def _gone(self, tensor: torch.Tensor, number: int) -> SavedTensor | None:
        """A handle for a tensor that does not stay in memory; None if it stays."""
        place = None
        with unseen(), contextlib.suppress(RuntimeError, MemoryError, OSError):
            place = self._place(tensor, number)
        if place is None:
            return None
        saved = SavedTensor(tensor, self._saved.backward)
        saved.lies_in(place)
        saved.tensor = None
        return saved

    def start(self) -> None:
        """Pack the tensors that are saved from now on, unless hooks of the user's are in place."""
        if not self._is_on and CAN_TELL and top_hooks() is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, unpack)
            self._is_on = True

    def rest(self) -> None:
        """Pack nothing until the next `start`: torch keeps tensors at less cost."""
        top = top_hooks()
        if self._is_on and top is not None and top[0] == self.pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._is_on = False

    def _place(self, tensor: torch.Tensor, number: int) -> Place | None:
        """The place of a tensor that is out of memory; None if the tensor stays."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        known = self._places.get(key)
        if known is not None and not known[1].expired() and known[2] == tensor._version:
            place = known[0]()
            if place is not None:
                if self._plan is None and key in self._noted:
                    self._again[number] = self._noted[key][1]
                return place
        if key in self._kept:
            return None
        plan = self._plan
        if plan is None:
            place = self._learned(tensor, storage, number)
        elif (nbytes := plan.dropped.get(number) or plan.copied.get(number)) is None:
            return None
        elif nbytes != storage.nbytes():  # another step than the one that was planned
            self._plan, self._steps, self._candidates, self._again = None, 0, [], {}
            return None
        else:
            place = self._planned(tensor, storage, is_dropped=number in plan.dropped)
        if place is not None:
            self._places[key] = (weakref.ref(place), StorageWeakRef(storage), tensor._version)
            self.spilled += place.nbytes
        return place

    def _learned(self, tensor: torch.Tensor, storage: torch.UntypedStorage, number: int) -> Place | None:
        """Note the prices of a tensor, and take it out while the step is above its budget."""
        noted = self._noted.get(int(storage._cdata))
        if noted is not None and not noted[0].expired():
            self._again[number] = noted[1]
            return None  # a storage that stays, saved once more
        self._noted[int(storage._cdata)] = (StorageWeakRef(storage), number)
        place = Place(storage, self._saved.backward)
        recipe = self._recipe(tensor, place)
        copy_seconds = self._copy_seconds(storage)
        seconds = None if recipe is None else recipe.seconds
        self._candidates.append(_Candidate(number, place.nbytes, seconds, copy_seconds))
        if self.spilled >= self.budget:
            return None
        if recipe is not None and seconds is not None and seconds <= copy_seconds:
            place.drop(recipe)
        else:
            self._copy(place, storage)
        return place

    def _planned(self, tensor: torch.Tensor, storage: torch.UntypedStorage, *, is_dropped: bool) -> Place:
        place = Place(storage, self._saved.backward)
        recipe = self._recipe(tensor, place) if is_dropped else None
        if recipe is not None:
            place.drop(recipe)
        else:
            self._copy(place, storage)
        return place

    def _recipe(self, tensor: torch.Tensor, place: Place) -> Recipe | None:
        with self._saved.backward.nothing_held():
            recipe = self._recipes.recipe_for(tensor)
        if recipe is None:
            return None
        place.depth = 1 + max((each.place.depth for each in recipe.sources() if each.place is not None), default=0)
        return recipe if place.depth <= _MAX_DEPTH else None

    def _copy_seconds(self, storage: torch.UntypedStorage) -> float:
        copies = self._space.copies(storage.device)
        if copies is None:
            return _FILE_SECONDS_PER_BYTE * storage.nbytes()
        self._is_overlapped = True
        return copies.seconds_per_byte * storage.nbytes()

    def _copy(self, place: Place, storage: torch.UntypedStorage) -> None:
        try:
            place.copy_out(storage, self._space)
        except OSError:
            self.failed = True
            raise
        self._last_copied = self._number
        place.depth = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
            yield
