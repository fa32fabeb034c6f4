"""Saved tensors that are parked as they are saved, because the steps before ran out of memory without it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchmedic.recovery.parking import SpillFile
from torchmedic.recovery.saved_tensors import (
    MIN_PARKED_BYTES,
    Place,
    SavedTensor,
    SavedTensors,
    is_plain,
    parameter_storages,
    unpack,
    unseen,
)


class EarlySpill:
    """Parks saved tensors as they are saved, up to a number of bytes per step: what once was needed is kept."""

    def __init__(self, saved: SavedTensors, file: SpillFile, budget: int) -> None:
        self._saved = saved
        self._file = file
        self.budget = budget
        self.spilled = 0  # in this step
        self._kept = parameter_storages()
        self._places: dict[int, tuple[weakref.ref[Place], StorageWeakRef, int]] = {}
        self.failed = False

    def next_step(self) -> None:
        self.spilled = 0
        self._places.clear()

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        place = None
        with unseen():
            if self.spilled < self.budget and not self.failed and is_plain(tensor):
                with contextlib.suppress(RuntimeError, MemoryError, OSError):
                    place = self._place(tensor)
            if place is None:
                return self._saved.pack(tensor)  # can still be parked when memory runs out
            saved = SavedTensor(tensor, place)
        saved.tensor = None
        return saved

    def _place(self, tensor: torch.Tensor) -> Place | None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._kept or storage.nbytes() < MIN_PARKED_BYTES:
            return None
        known = self._places.get(key)
        if known is not None and not known[1].expired() and known[2] == tensor._version:
            place = known[0]()
            if place is not None:
                return place
        place = Place(storage)
        try:
            place.park_early(storage, self._file)
        except OSError:
            self.failed = True
            raise
        self._places[key] = (weakref.ref(place), StorageWeakRef(storage), tensor._version)
        self.spilled += place.nbytes
        return place

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
            yield
