"""The batch that is being trained on, and which items of the dataset it was made of."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchmedic.observe.step.items import items_of, through_subsets
from torchmedic.observe.step.kept_batch import KeptBatch
from torchmedic.observe.step.tensors import is_mapping, tensors_in
from torchmedic.source.objects.weak_table import WeakTable

_new_tuple: Any = tuple.__new__  # the constructor of a named tuple takes five times as long
_weak_reference = weakref.ref
MAX_FLAT = 16  # tensors of a batch that is taken as it is
_Tensor = torch.Tensor
_KNOWN = 3  # the last batches: one, and two before it


class _Pass:
    """A pass of an iterator over its sampler: the indices that were drawn and have not come back, in order."""

    def __init__(self, iterator: Any, sampling: Any) -> None:
        self.iterator = weakref.ref(iterator)
        self.sampling = sampling
        self.pending: deque[Any] = deque()
        self.taken = 0
        self.last: Any = None


class _Came(NamedTuple):
    """A batch that has come; its tensors are only known as long as somebody else holds them."""

    tensors: list[weakref.ref[torch.Tensor]]
    indices: Any
    source: weakref.ref[Any] | None
    batch: KeptBatch | None  # only where a library asked, which may be a batch ahead of the user and holds it too


_Fields = tuple[list[weakref.ref[torch.Tensor]], Any, weakref.ref[Any] | None, KeptBatch | None]
_NOTHING = _Came([], None, None, None)


class Given(NamedTuple):
    """The shape of a module's input, with the module and its mode: only calls of one kind are comparable."""

    shape: torch.Size
    training: bool
    grad: bool = True
    module: int = 0  # its identity
    nested: bool = False  # it is the largest tensor of a list, a dict or an object: its first dimension may be anything


class HostBatch(NamedTuple):
    """A batch in host memory, and which items of the dataset it was made of."""

    whole: Any
    indices: Any

    def tensors(self) -> list[torch.Tensor]:
        return tensors_in(self.whole)


class Batches:
    """References to the last batch that a DataLoader yielded, with its dataset indices.

    Some libraries fetch a batch ahead, so the last one need not be the one that is being trained on. `settle` finds out
    at the moment of a failure; where it cannot, nothing is claimed.
    """

    def __init__(self) -> None:
        # The last batches, the last one at the end. To make a named tuple of each takes too long.
        self.came_last: deque[_Fields] = deque(maxlen=_KNOWN)
        self.direct = True  # the user's own loop asked for it
        self.is_asked = False  # for a batch that has not come
        self._passes: WeakTable[_Pass] = WeakTable()
        self.last_pass: _Pass | None = None  # that was asked for: nearly always the one that is asked for again
        self.kept: KeptBatch | None = None  # the last batch
        self._taken: tuple[Any, weakref.ref[Any] | None] = None, None  # the origin of the batch that comes
        self.number = -1
        self.requests = 0  # for a batch, also those that found none
        self.asked: weakref.ref[Any] | None = None  # for the last one
        self.shapes: deque[Given] = deque(maxlen=64)  # of what root modules were called with, the last one last

    def index_drawn(self, iterator: Any, index: Any) -> None:
        """The sampler gave the indices of a coming batch; with workers, several are under way."""
        current = self.last_pass
        if (
            current is None
            or current.iterator() is not iterator
            or current.sampling is not getattr(iterator, "_sampler_iter", None)
        ):
            current = self._pass_drawn_from(iterator)
        if current is not None:
            current.pending.append(index)

    def _pass_drawn_from(self, iterator: Any) -> _Pass | None:
        if not getattr(iterator, "_in_order", True):
            return None  # batches may overtake each other, so the order of drawing says nothing
        sampling = getattr(iterator, "_sampler_iter", None)
        current = self._pass_of(iterator)
        if current is None or current.sampling is not sampling:
            # Persistent workers keep their iterator for the next epoch, also when the last one was left early.
            current = self._passes[iterator] = self.last_pass = _Pass(iterator, sampling)
        return current

    def _pass_of(self, iterator: Any) -> _Pass | None:
        last = self.last_pass
        if last is None or last.iterator() is not iterator:
            last = self.last_pass = self._passes.get(iterator)
        return last

    def requested(self, iterator: Any) -> None:
        """The user asked for the next batch: the last one is no longer ours to hold."""
        self.requests += 1
        self.asked = weakref.ref(iterator)
        self.is_asked = True
        self.kept = None
        if not self.direct and len(self.came_last) == _KNOWN:
            self.came_last.popleft()

    def taken(self, iterator: Any) -> None:
        """A batch has come back, or failed to: name its indices."""
        current = self.last_pass
        if current is None or current.iterator() is not iterator:
            current = self._pass_of(iterator)
        indices = None
        if current is not None and current.pending:
            indices = current.last = current.pending.popleft()
            current.taken += 1
        self._taken = indices, current.iterator if current is not None else weakref.ref(iterator)

    def came(self, iterator: Any, batch: Any, *, is_kept: bool) -> None:
        """`taken` and `arrived` in one, for a step that is sampled out."""
        current = self.last_pass
        if current is not None and current.iterator() is iterator and current.pending:
            indices = current.last = current.pending.popleft()
            current.taken += 1
            source: weakref.ref[Any] | None = current.iterator
        else:
            self.taken(iterator)
            indices, source = self._taken
        self.is_asked = False
        self.number += 1
        kind, weak = type(batch), []
        if (kind is list or kind is tuple) and len(batch) <= MAX_FLAT:
            for each in batch:
                if type(each) is not _Tensor:
                    break
                weak.append(_weak_reference(each))
        is_flat = bool(weak) and len(weak) == len(batch)
        if is_kept or not is_flat:
            tensors = batch if is_flat else tensors_in(batch)
            if not is_flat:
                weak = list(map(_weak_reference, tensors))
            self.kept = KeptBatch(batch, tensors, weak if is_flat else None) if is_kept else None
        self.came_last.append((weak, indices, source, None if self.direct else self.kept))

    @property
    def indices(self) -> Any:
        """The items of the last batch, as indices of the user's own dataset."""
        return items_of(self.origin)

    def under_way(self, iterator: Any) -> dict[int, Any]:
        """The indices of the last batch that was taken and of all later ones, by their number in this pass."""
        current = self._passes.get(iterator)
        if current is None:
            return {}
        dataset = getattr(iterator, "_dataset", None)
        known = enumerate([current.last, *current.pending], current.taken - 1)
        return {number: through_subsets(dataset, index) for number, index in known if number >= 0}

    def iterators(self) -> list[Any]:
        """The DataLoader iterators that are alive and have drawn something."""
        return self._passes.alive()

    def arrived(self, batch: Any, *, direct: bool = True, is_kept: bool = True) -> None:
        """A batch has come. If it is not kept, it can be replayed only while the user's own variables hold it."""
        self.is_asked = False
        self.number += 1
        self.direct = direct
        tensors = tensors_in(batch)
        weak = list(map(_weak_reference, tensors))
        self.kept = KeptBatch(batch, tensors) if is_kept else None
        self.came_last.append(_Came(weak, *self._taken, None if direct else self.kept))
        self._taken = None, None

    @property
    def nbytes(self) -> int:
        """The size of the last batch."""
        return self.kept.nbytes if self.kept is not None else 0

    @property
    def on_host(self) -> bool:
        """Whether all of the last batch is in host memory."""
        return self.kept is None or self.kept.on_host

    def given(self, args: Any, module: torch.nn.Module) -> None:
        """A root module is called: note how large its first argument is, should one turn out too large."""
        first = args[0] if args else None
        main = first if type(first) is torch.Tensor else main_input(args)
        if main is not None:
            nested = main is not first and not any(main is each for each in args)
            self.shapes.append(Given(main.shape, module.training, torch.is_grad_enabled(), id(module), nested))

    def settle(self, in_use: Iterable[torch.Tensor]) -> None:
        """Make the batch that these tensors belong to the current one; forget it if that cannot be told."""
        storages = {_storage(tensor) for tensor in in_use} - {None}
        if any(_storage(tensor) in storages for tensor in self.tensors()) or self._take_earlier(storages):
            return
        if self.direct:
            return
        # Whoever fetches ahead is a generator that still holds what it has yielded; the older batch is in use.
        if not self._take_earlier({_storage(tensor) for tensor in _tensors_in_generators()} - {None}):
            self._make_current(_NOTHING)

    def _take_earlier(self, storages: set[int | None]) -> bool:
        for earlier in self._earlier if not self.direct else reversed(self._earlier):
            alive = [tensor for reference in earlier.tensors if (tensor := reference()) is not None]
            if any(_storage(tensor) in storages for tensor in alive):
                self._make_current(earlier)
                return True
        return False

    def _make_current(self, batch: _Came) -> None:
        self.is_asked, self.kept = False, batch.batch
        self.came_last.append(batch)

    @property
    def _current(self) -> _Came:
        """The last batch; nothing while another one is awaited."""
        return _NOTHING if self.is_asked or not self.came_last else _Came(*self.came_last[-1])

    @property
    def _earlier(self) -> list[_Came]:
        """The two batches before that."""
        known = [_Came(*each) for each in self.came_last]
        return known[1 - _KNOWN :] if self.is_asked else known[:-1]

    def recent(self) -> list[HostBatch]:
        """The batches that may be in use and are held here: the last one, and those before it that a library fetched.

        To be asked before `settle`, which makes up its mind by what it can see.
        """
        known = [(self.kept, self.origin)]
        known += [(earlier.batch, (earlier.indices, earlier.source)) for earlier in reversed(self._earlier)]
        return [
            HostBatch(whole, items_of(origin))
            for kept, origin in known
            if kept is not None and (whole := kept.whole) is not None
        ]

    @property
    def origin(self) -> tuple[Any, weakref.ref[Any] | None]:
        """The drawn indices of the last batch and the iterator that drew them, for `items_of`."""
        if self.is_asked or not self.came_last:
            return None, None
        _, indices, source, _ = self.came_last[-1]
        return indices, source

    @property
    def whole(self) -> Any:
        """The last batch as it was yielded; None where some of it is gone."""
        return self.kept.whole if self.kept is not None else None

    @property
    def files(self) -> int:
        """How many files the last batch keeps open: one for each tensor that a worker sent, unless it was copied."""
        source = reference() if (reference := self.origin[1]) is not None else None
        if self.kept is None or type(source) is not _MultiProcessingDataLoaderIter or source._pin_memory:
            return 0
        return self.kept.count if get_sharing_strategy() == "file_descriptor" else 0

    @property
    def is_shared(self) -> bool:
        """Whether the last batch lies in memory shared with the workers, of which there may be little."""
        tensors = self.tensors() if self.on_host else []
        return bool(tensors) and tensors[0].is_shared()

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the last batch that are still alive, in order."""
        if self.kept is not None:
            return self.kept.tensors()
        return [tensor for reference in self._current.tensors if (tensor := reference()) is not None]


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # ValueError: a lazy parameter has none yet
        return None


def _tensors_in_generators() -> list[torch.Tensor]:
    """The tensors that suspended generators of libraries hold."""
    found: list[torch.Tensor] = []
    for value in gc.get_objects():
        if type(value) is GeneratorType and value.gi_frame is not None and not value.gi_running:
            found += [tensor for held in list(value.gi_frame.f_locals.values()) for tensor in tensors_in(held, 3)]
    return found


def main_input(args: Collection[Any]) -> torch.Tensor | None:
    """What a module is called with: its first tensor, or the largest one in a list of images, a graph, a dict."""
    first = next((each for each in args if type(each) is torch.Tensor), None)
    for each in args if first is None else ():
        plain = isinstance(each, list | tuple | torch.nn.Module) or is_mapping(each)
        inside = tensors_in(each if plain else getattr(each, "__dict__", None), 2)
        tensors = [tensor for tensor in inside if type(tensor) is torch.Tensor]
        if tensors:
            return max(tensors, key=torch.Tensor.numel)
    return first
