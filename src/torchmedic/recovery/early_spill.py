"""Saved tensors that do not stay in memory, because the steps before ran out of memory with them.

The cheapest way comes first. A tensor that can be computed again in little time is dropped. Others are copied to the
host beside the computation, as many as the time of a forward pass allows; these are the first ones of a step, which
backward needs last. Where that is not enough, tensors are dropped that take more time to compute.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchmedic.observe.saved_hooks import CAN_TELL, top_hooks
from torchmedic.recovery.parking import ParkingSpace
from torchmedic.recovery.places import Place
from torchmedic.recovery.recipes import Recipe, Recipes
from torchmedic.recovery.saved_tensors import (
    MIN_PARKED_BYTES,
    SavedTensor,
    SavedTensors,
    is_plain,
    parameter_storages,
    unpack,
    unseen,
)

_CHEAP_SHARE = 0.25  # of the time of a copy: a recipe that takes no more is preferred to any copy
_FORWARD_SHARE = 0.3  # of a step, in which copies run beside the computation
_MAX_DEPTH = 3  # of places that must be computed again for one place
_FILE_SECONDS_PER_BYTE = 1e-9
_SOON = 24  # saved tensors after the last copied one, at which copies back begin
_LEARNING_STEPS = 2


class EarlySpill:
    """Takes saved tensors out of memory as they are saved, up to a number of bytes per step."""

    def __init__(self, saved: SavedTensors, space: ParkingSpace, recipes: Recipes, budget: int) -> None:
        self._saved = saved
        self._space = space
        self._recipes = recipes
        self.budget = budget
        self.spilled = 0  # bytes in this step, both copied and dropped
        self.failed = False
        self._copied = 0
        self._kept = parameter_storages()
        self._places: dict[int, tuple[weakref.ref[Place], StorageWeakRef, int]] = {}
        self._steps = 0
        self._cheap_bytes = 0  # that can be dropped in a step at next to no cost
        self._is_overlapped = False  # whether copies are made beside the computation
        self._seconds_per_byte = _FILE_SECONDS_PER_BYTE
        self._max_copied = budget
        self._since_copy = _SOON
        self._began: float | None = None
        self._is_on = False  # as default hooks, from `start` on

    def next_step(self) -> None:
        """Plan the next step by the last one."""
        now = time.perf_counter()
        if self._began is not None:
            rest = max(self.budget - self._cheap_bytes, 0)
            beside = (now - self._began) * _FORWARD_SHARE if self._is_overlapped else 0.0
            free_of_cost = int(beside / self._seconds_per_byte)
            missing = max(self.budget - self.spilled, 0) if self._max_copied < self.budget else 0
            self._max_copied = min(rest, max(free_of_cost, self._copied + missing))
            self._steps += 1
        self._began = now
        self.spilled = self._copied = 0
        self._cheap_bytes = 0 if self._steps < _LEARNING_STEPS else self._cheap_bytes
        self._since_copy = _SOON
        self._places.clear()
        self._saved.backward.next_step()

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        self._saved.note_new()
        with unseen():
            place = None
            if not self.failed and is_plain(tensor):
                with contextlib.suppress(RuntimeError, MemoryError, OSError):
                    place = self._place(tensor)
            if place is not None:
                saved = SavedTensor(tensor, place)
                saved.tensor = None
                return saved
            saved = self._saved.pack(tensor)  # can still be parked when memory runs out
        self._since_copy += 1
        if self._since_copy < _SOON:
            saved.ahead = (self._saved.backward, self._saved.backward.order)
        elif self.spilled >= self.budget and self._steps >= _LEARNING_STEPS:
            self.rest()
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

    def _place(self, tensor: torch.Tensor) -> Place | None:
        """The place of a tensor that is out of memory; None if the tensor stays."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._kept or storage.nbytes() < MIN_PARKED_BYTES:
            return None
        known = self._places.get(key)
        if known is not None and not known[1].expired() and known[2] == tensor._version:
            place = known[0]()
            if place is not None:
                return place
        is_over = self.spilled >= self.budget
        if is_over and self._steps >= _LEARNING_STEPS:
            return None
        place = Place(storage, self._saved.backward)
        recipe = self._recipe(tensor, place)
        copy_seconds = self._copy_seconds(storage)
        is_cheap = recipe is not None and recipe.seconds <= _CHEAP_SHARE * copy_seconds
        if is_cheap and self._steps < _LEARNING_STEPS:
            self._cheap_bytes += place.nbytes
        if is_over:
            return None
        can_copy = self._copied < self._max_copied
        if recipe is not None and (is_cheap or (not can_copy and recipe.seconds <= copy_seconds)):
            place.drop(recipe)
        elif can_copy:
            self._copy(place, storage)
        else:
            return None
        self._places[key] = (weakref.ref(place), StorageWeakRef(storage), tensor._version)
        self.spilled += place.nbytes
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
        if copies is not None:
            self._is_overlapped, self._seconds_per_byte = True, copies.seconds_per_byte
        return self._seconds_per_byte * storage.nbytes()

    def _copy(self, place: Place, storage: torch.UntypedStorage) -> None:
        try:
            place.copy_out(storage, self._space)
        except OSError:
            self.failed = True
            raise
        place.depth = 0
        self._copied += place.nbytes
        self._since_copy = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
            yield
