"""Tensors that the autograd graph has saved for backward: parked when memory is short, back when backward needs them.

A saved tensor can be taken from the graph after the fact: its node hands it out and keeps a handle in its place. So
nothing has to be decided, and nothing costs, before memory runs out.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchmedic.recovery.handles import SavedTensor, gone, unpack
from torchmedic.recovery.living_tensors import is_plain, parameter_storages
from torchmedic.recovery.parking import ParkingSpace
from torchmedic.recovery.places import Backward, Place
from torchmedic.source.objects.graph import walk
from torchmedic.source.objects.living import living

_RAW = "_raw_saved_"
MIN_PARKED_BYTES = 4096
_MAX_PIECES = 64  # smaller ones are parked only if that many are not enough
_MAX_NODES = 200_000
_MAX_TENSORS = 10_000  # in one attribute of a node
# Whether torch tells which saved tensors have hooks: since 2.7. Before that, a node's tensors are taken to be read.
CAN_TELL = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
_names: dict[type, tuple[str, ...]] = {}


class SavedTensors:
    """The saved tensors of this process that have been taken from their graphs."""

    def __init__(self, space: ParkingSpace, make_room: Callable[[int], bool] = lambda _: False) -> None:
        self._space = space
        self.backward = Backward(make_room)
        self._sequence = 0  # of the node that a tensor is taken from
        self.ours: set[int] = set()  # numbers of nodes whose saved tensors our hooks have packed
        self._parameters: frozenset[int] = frozenset()  # keys of their storages
        self._places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()

    def park(self, wanted: int, busy: frozenset[int], *, search: bool = True) -> int:
        """Park saved tensors until so many bytes are free, those first that backward needs last.

        Returns:
            The bytes that became free.

        Args:
            wanted: In bytes.
            busy: Keys of storages that are in use.
            search: Whether nodes may have been made since the last search, which takes a while.

        Raises:
            OSError: There is no room to park them.
        """
        if search:
            self._parameters = parameter_storages()
            self._find_places(list(walk(_live_nodes())))
        kept = busy | self._parameters
        free = 0
        large = wanted // _MAX_PIECES
        for place in sorted(self._places.values(), key=lambda each: (each.nbytes < large, each.sequence)):
            if free >= wanted:
                break
            if place.key not in kept and place.nbytes >= MIN_PARKED_BYTES:
                free += place.park(self._space)
        return free

    def take(self, nodes: Iterable[Any]) -> None:
        """Take the saved tensors of nodes that no hook has packed."""
        for node in nodes:
            self._sequence = node._sequence_nr()
            if not CAN_TELL and self._sequence in self.ours:
                continue
            for raw in _unpacked(node):
                try:
                    raw.register_hooks(self.pack, unpack)
                except RuntimeError:  # there are hooks already, a checkpoint's for example
                    self.ours.discard(self._sequence)
                    break

    def natives(self, node: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The saved tensors of a node that no hook has packed: attribute, position in it, tensor."""
        for name in _names_of(node):
            for position in range(_MAX_TENSORS):
                tensor = self.native(node, name, position)
                if tensor is None:
                    break
                yield name, position, tensor

    def native(self, node: Any, name: str, position: int) -> torch.Tensor | None:
        """A saved tensor that no hook has packed; None if there is none.

        Raises:
            RuntimeError: A backward has been through the node, or the tensor was changed in place.
        """
        raw: Any = getattr(node, name, None)
        is_list = isinstance(raw, tuple | list)
        if is_list:
            raw = raw[position] if position < len(raw) else None
        if raw is None or (position and not is_list):
            return None
        if CAN_TELL:
            if raw.unpack_hook is not None:
                return None
        else:
            self.take([node])
            if not (found := self.packed(node, name)) or any(each.tensor is None for each in found):
                return None
        value: Any = getattr(node, _public(name))
        return value[position] if is_list else value  # type: ignore[no-any-return]

    def put(self, node: Any, name: str, position: int, saved: SavedTensor) -> None:
        """Have a node keep a handle in place of a tensor that no hook has packed."""
        if CAN_TELL:
            raw = getattr(node, name)
            raw = raw[position] if isinstance(raw, tuple | list) else raw
            raw.register_hooks(lambda _: saved, unpack)
            if len(self.ours) > _MAX_NODES:
                self.ours.clear()
            self.ours.add(node._sequence_nr())
        else:
            self.packed(node, name)[position].become(saved)

    def source(self, node: Any, name: str) -> SavedTensor | None:
        """A handle for what a node keeps; None if it keeps nothing, or if a hook of others would be called.

        The node keeps the same handle from now on, so that a tensor can still be parked that a recipe needs.
        """
        if found := self.packed(node, name):
            return found[0]
        tensor = self.native(node, name, 0)
        if tensor is None:
            return None
        if not CAN_TELL:
            return self.packed(node, name)[0]
        saved = SavedTensor(tensor, self.backward)
        if tensor.nbytes >= MIN_PARKED_BYTES and is_plain(tensor):
            self.put(node, name, 0, saved)
        return saved

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Take a tensor from its node."""
        self.ours.add(self._sequence)
        return SavedTensor(tensor, self.backward)

    def _find_places(self, nodes: list[Any]) -> None:
        """Find the places of the tensors that nodes have saved."""
        self.take(nodes)
        for node in nodes:
            for name in _names_of(node):
                for each in self.packed(node, name):
                    place = self._place_of(each)
                    if place is not None:
                        place.sequence = max(place.sequence, node._sequence_nr())

    def _place_of(self, saved: SavedTensor) -> Place | None:
        if saved.place is None and saved.tensor is not None and is_plain(saved.tensor):
            storage = saved.tensor.untyped_storage()
            place = self._places.get(int(storage._cdata))
            if place is None or place.is_out:
                place = self._places[int(storage._cdata)] = Place(storage, self.backward)
            saved.lies_in(place)
        return saved.place

    def packed(self, node: Any, name: str) -> list[SavedTensor]:
        """The handles behind an attribute of a node; hooks of others are not called."""
        if node._sequence_nr() not in self.ours:
            return []
        found: list[SavedTensor] = []
        SavedTensor.asked = found
        try:
            getattr(node, _public(name))
        except (RuntimeError, AttributeError):  # freed by a backward
            return []
        finally:
            SavedTensor.asked = None
        return found

    def storages(self, nodes: Iterable[Any]) -> Iterator[tuple[int, int, int, bool]]:
        """The storages that nodes have saved tensors in: number of the node, key, bytes, whether it is in memory."""
        for node in nodes:
            number = node._sequence_nr()
            if not CAN_TELL:
                self.take([node])
            for name in _names_of(node):
                for each in self.packed(node, name):
                    if each.place is not None:
                        yield number, each.key, each.place.nbytes, not each.place.is_out
                        yield from ((number, source.key, source.nbytes, False) for source in each.place.sources())
                    elif each.tensor is not None and is_plain(each.tensor):
                        yield number, each.key, each.tensor.untyped_storage().nbytes(), True
            with contextlib.suppress(RuntimeError):
                for _, _, tensor in self.natives(node) if CAN_TELL else ():
                    if is_plain(tensor):
                        storage = tensor.untyped_storage()
                        yield number, int(storage._cdata), storage.nbytes(), True

    def release(self, roots: Iterable[torch.Tensor]) -> None:
        """Free what the graph behind some tensors has saved, as a completed backward would have done."""
        for node in walk(root.grad_fn for root in roots):
            for name in _names_of(node):
                for each in self.packed(node, name):
                    each.tensor = each.place = None
            for raw in _saved_by(node):
                with contextlib.suppress(RuntimeError):
                    raw.register_hooks(_drop, gone)


def _drop(tensor: torch.Tensor) -> None:
    return None


def _live_nodes() -> Iterator[Any]:
    for tensor in living(torch.Tensor):
        with contextlib.suppress(RuntimeError):  # a view whose base was changed in place does not say
            if tensor.grad_fn is not None:
                yield tensor.grad_fn


def _names_of(node: Any) -> tuple[str, ...]:
    """The attributes of a node that hold saved tensors."""
    names = _names.get(type(node))
    if names is None:
        names = _names[type(node)] = tuple(name for name in dir(type(node)) if name.startswith(_RAW))
    return names


def _public(name: str) -> str:
    """The attribute with the tensors themselves."""
    return "saved_tensors" if name == f"{_RAW}tensors" else name.replace("_raw", "")


def _saved_by(node: Any) -> Iterator[Any]:
    """What hands out the saved tensors of a node."""
    for name in _names_of(node):
        try:
            raw = getattr(node, name)
        except (RuntimeError, AttributeError):
            continue  # a backward has been through it
        yield from (each for each in (raw if isinstance(raw, tuple | list) else (raw,)) if each is not None)


def _unpacked(node: Any) -> Iterator[Any]:
    """The saved tensors of a node that no hook has packed, and that nothing has changed since they were saved."""
    for name in _names_of(node):
        try:
            raw = getattr(node, name)
            raws = [each for each in (raw if isinstance(raw, tuple | list) else (raw,)) if each is not None]
            # Versions of torch that do not say whether there are hooks raise when hooks are registered twice.
            if all(getattr(each, "unpack_hook", None) is None for each in raws):
                if all(hasattr(each, "unpack_hook") for each in raws):
                    getattr(node, _public(name))
                yield from raws
        except (RuntimeError, AttributeError):
            continue  # a backward has been through it, or the tensor was changed in place
