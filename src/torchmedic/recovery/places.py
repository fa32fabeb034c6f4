"""The memory of one storage that saved tensors lie in: in memory, copied elsewhere, or to be computed again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.recovery.parking import Parked, ParkingSpace
from torchmedic.recovery.pinned_copies import Arrival

if TYPE_CHECKING:
    from torchmedic.recovery.handles import SavedTensor
    from torchmedic.recovery.patterns import Recipe


class Backward:
    """What places must know about the backward passes that use them."""

    def __init__(self, make_room: Callable[[int], bool] = lambda _: False) -> None:
        self.make_room = make_room  # for so many bytes, while a pass runs; says whether there is more now
        self.with_any_kernel: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.keeps_graph = False  # so nothing that is brought back may stay in memory until its node is gone
        self.order: list[weakref.ref[Place]] = []  # the places that were copied in this step, oldest first
        self._next = -1  # the place of that order to be fetched next: backward comes to the last one first
        self._freed = 0  # bytes that were in memory before the pass, and that it needs no more: half are free at least
        self._spare = 0

    def begin(self, spare: int, *, keeps_graph: bool) -> None:
        """A backward pass begins, with so many bytes beside what it needs."""
        self._freed, self._spare, self.keeps_graph = 0, spare, keeps_graph
        self._next = len(self.order) - 1

    def has_room_for(self, nbytes: int) -> bool:
        """Whether so many bytes can be in memory before they are needed."""
        return nbytes <= self._spare + (0 if self.keeps_graph else self._freed // 2)

    def next_step(self) -> None:
        self.order = []

    @contextlib.contextmanager
    def nothing_held(self) -> Iterator[None]:
        """Nothing that is brought back inside the block stays in memory after its use."""
        before, self.keeps_graph = self.keeps_graph, True
        try:
            yield
        finally:
            self.keeps_graph = before

    def copied(self, place: Place) -> int:
        """A place was copied; returns its position in the order."""
        self.order.append(weakref.ref(place))
        self._next = len(self.order) - 1
        return self._next

    def fetch_ahead(self, before: int | None = None, freed: int = 0) -> None:
        """Start to bring back the places that backward comes to next.

        Args:
            before: The places before this position of the order come next.
            freed: Bytes that the pass has freed by now, at least.
        """
        self._freed = max(self._freed, freed)
        if before is not None:
            self._next = min(self._next, before - 1)
        while self._next >= 0:
            place = self.order[self._next]()
            if place is not None and not place.fetch():
                return
            self._next -= 1

    def has_more_room(self, nbytes: int) -> bool:
        """Give up what was brought back before it is needed, then park: there is no memory for what is needed now."""
        fetched = [place for reference in self.order if (place := reference()) is not None and place.unfetch()]
        return bool(fetched) or self.make_room(nbytes)


class Place:
    """The memory of one storage that saved tensors lie in."""

    def __init__(self, storage: torch.UntypedStorage, backward: Backward, number: int = 0) -> None:
        self.key = int(storage._cdata)
        self.number = number  # among the saved tensors of a step whose prices are noted
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self.tensors: list[weakref.ref[SavedTensor]] = []
        self.sequence = 0  # of the node that backward comes to first
        self._backward = backward
        self._source: Parked | Recipe | None = None
        self._restored: StorageWeakRef | None = None
        self._held: torch.UntypedStorage | None = None
        self._arrival: Arrival | None = None
        self._position: int | None = None  # in the order of copied places

    @property
    def is_out(self) -> bool:
        return self._source is not None

    def sources(self) -> Iterator[Place]:
        """The places out of memory that must be brought back for this one."""
        if self._source is not None and not isinstance(self._source, Parked):
            for each in self._source.sources():
                if each.place is not None and each.place.is_out:
                    yield each.place
                    yield from each.place.sources()

    def park(self, space: ParkingSpace) -> int:
        """Park the storage, and return the bytes that became free: 0 if others hold the storage too.

        Raises:
            OSError: There is no room for it.
        """
        held = [each for reference in self.tensors if (each := reference()) is not None and each.tensor is not None]
        if not held or self._source is not None:
            return 0
        first = held[0].tensor
        assert first is not None
        storage = first.untyped_storage()
        parked = Parked(storage, space)
        weak = StorageWeakRef(storage)
        for each in held:
            each.tensor = None
        del storage, first
        if not weak.expired():
            still = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if still is not None:
                for each in held:
                    each.put_back(still)
                return 0
        self._source = parked
        return self.nbytes

    def copy_out(self, storage: torch.UntypedStorage, space: ParkingSpace, *, overlapped: bool) -> None:
        """Copy a storage that is still in use; its memory becomes free when its last user is gone."""
        self._source = Parked(storage, space, overlapped=overlapped)
        self._position = self._backward.copied(self)

    def drop(self, recipe: Recipe) -> None:
        """Rely on a recipe; the memory becomes free when its last user is gone."""
        self._source = recipe

    def storage(self) -> torch.UntypedStorage:
        """The storage with its contents; all saved tensors that lie in it share it again."""
        assert self._source is not None
        if self._held is not None:
            return self._held
        if self._restored is not None and not self._restored.expired():
            found = torch.UntypedStorage._new_with_weak_ptr(self._restored.cdata)
            if found is not None:
                return found
        storage = self._brought_back(self._source)
        if self._backward.keeps_graph:
            self._restored = StorageWeakRef(storage)
        else:
            self._held = storage
        if self._position is not None:
            self._backward.fetch_ahead(self._position)
        return storage

    def _brought_back(self, source: Parked | Recipe) -> torch.UntypedStorage:
        if self._arrival is not None:
            storage = self._arrival.storage()
            self.unfetch()
            return storage
        while True:
            try:
                return source.new_storage()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            if not self._backward.has_more_room(self.nbytes):
                with self._backward.with_any_kernel():
                    return source.new_storage()

    def fetch(self) -> bool:
        """Start to bring the contents back; False if there is no room for them yet."""
        source = self._source
        if self._arrival is not None or self._held is not None or not isinstance(source, Parked):
            return True
        copies = source.copies
        if (
            copies is None
            or not copies.has_room_ahead()
            or not self._backward.has_room_for(copies.ahead_bytes + self.nbytes)
        ):
            return False
        try:
            self._arrival = source.arrival()
        except torch.OutOfMemoryError:
            copies.less_ahead()
            return False
        copies.ahead_bytes += self.nbytes
        return True

    def unfetch(self) -> bool:
        """Let go of what `fetch` started; whether it had."""
        if self._arrival is None:
            return False
        self._arrival = None
        if isinstance(self._source, Parked) and self._source.copies is not None:
            self._source.copies.ahead_bytes -= self.nbytes
        return True

    def __del__(self) -> None:
        if getattr(self, "_arrival", None) is not None:
            self.unfetch()
