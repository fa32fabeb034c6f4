"""Tensors that the autograd graph has saved for backward: parked when memory is short, back when backward needs them.

A saved tensor can be taken from the graph after the fact: its node hands it out and keeps a handle in its place. So
nothing has to be decided, and nothing costs, before memory runs out.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch

from torchmedic.recovery.living_tensors import is_plain, living_tensors, parameter_storages, unseen
from torchmedic.recovery.parking import ParkingSpace
from torchmedic.recovery.places import Backward, Place
from torchmedic.source.objects.graph import walk

_RAW = "_raw_saved_"
MIN_PARKED_BYTES = 4096
_MAX_PIECES = 64  # smaller ones are parked only if that many are not enough
_MAX_NODES = 200_000
_NOTHING = torch.empty(0)
_names: dict[type, tuple[str, ...]] = {}


class SavedTensor:
    """What a node of the graph keeps instead of a tensor."""

    __slots__ = (
        "__weakref__",
        "_backward",
        "_device",
        "_is_result",
        "_kind",
        "_original",
        "_version",
        "freed",
        "is_ahead",
        "place",
        "tensor",
    )
    asked: ClassVar[list[SavedTensor] | None] = None  # who is asked for a tensor, while only that is of interest

    def __init__(self, tensor: torch.Tensor, backward: Backward) -> None:
        # Without its graph: a node that saves its own result would keep itself alive.
        self._is_result = tensor.grad_fn is not None
        self.tensor: torch.Tensor | None = tensor
        if self._is_result:
            with unseen():
                self.tensor = tensor.detach()
        self.place: Place | None = None
        self.is_ahead = False  # whether backward needs copied tensors soon after this one
        self.freed = 0  # bytes that are free again when backward comes to this tensor, as far as a plan knows
        self._backward = backward
        self._version = tensor._version
        self._original = weakref.ref(tensor)

    def lies_in(self, place: Place) -> None:
        """Note where the tensor lies, before it can leave its memory."""
        self._kind = self.kind
        self._device = place.device
        self.place = place
        place.tensors.append(weakref.ref(self))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Type and layout: two tensors of one kind lie in memory alike."""
        tensor = self.tensor
        if tensor is None:
            return self._kind
        if tensor.layout is not torch.strided:
            return (tensor.dtype, 0, (), ())
        return (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in a storage, with the offset and the strides that it had."""
        return torch.empty(0, dtype=self._kind[0], device=self._device).set_(storage, *self._kind[1:])

    @property
    def address(self) -> int:
        """Where the tensor lies; 0 while it is not in memory."""
        return 0 if self.tensor is None else self.tensor.data_ptr()

    def unpack(self) -> torch.Tensor:
        """The tensor for backward.

        Raises:
            RuntimeError: The tensor was changed in place. Autograd checks only tensors without hooks.
        """
        if SavedTensor.asked is not None:
            SavedTensor.asked.append(self)
            return _NOTHING
        living = self._original()
        if living is not None and living._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{living.type()} {list(living.shape)}] is at version {living._version}; expected version "
                f"{self._version} instead. Hint: enable anomaly detection to find the operation that failed to "
                "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
            )
        if self.is_ahead:
            self._backward.consumed = max(self._backward.consumed, self.freed)
            self._backward.fetch_ahead()
        if self.tensor is not None:
            if self._is_result:  # parameters stay in memory
                self._backward.consumed += self.tensor.nbytes
            return self.tensor
        if self.place is None:
            return _gone(None)
        with unseen():
            return self.on(self.place.storage())


def unpack(saved: Any) -> Any:
    return saved.unpack()


class SavedTensors:
    """The saved tensors of this process that have been taken from their graphs."""

    def __init__(self, space: ParkingSpace, make_room: Callable[[int], bool] = lambda _: False) -> None:
        self._space = space
        self.backward = Backward(make_room)
        self._sequence = 0  # of the node that a tensor is taken from
        self.ours: set[int] = set()  # numbers of nodes whose saved tensors our hooks have packed
        self._places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()

    def park(self, wanted: int, busy: frozenset[int]) -> int:
        """Park saved tensors until so many bytes are free, those first that backward needs last.

        Returns:
            The bytes that became free.

        Args:
            wanted: In bytes.
            busy: Keys of storages that are in use.

        Raises:
            OSError: There is no room to park them.
        """
        kept = busy | parameter_storages()
        self._find_places(list(walk(_live_nodes())))
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
            for raw in _unpacked(node):
                try:
                    raw.register_hooks(self.pack, unpack)
                except RuntimeError:  # there are hooks already, a checkpoint's for example
                    self.ours.discard(self._sequence)
                    break

    def note_new(self) -> None:
        """A hook of ours packs a tensor of the node that is being made."""
        self._sequence = torch._C._autograd._get_sequence_nr() - 1
        if len(self.ours) > _MAX_NODES:
            self.ours.clear()
        self.ours.add(self._sequence)

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Take a tensor from its node."""
        self.ours.add(self._sequence)
        return SavedTensor(tensor, self.backward)

    def _find_places(self, nodes: list[Any]) -> list[Place]:
        """The places of the tensors that nodes have saved."""
        self.take(nodes)
        found: dict[int, Place] = {}
        for node in nodes:
            for name in _names_of(node):
                for each in self.packed(node, name):
                    place = self._place_of(each)
                    if place is not None:
                        place.sequence = max(place.sequence, node._sequence_nr())
                        found[id(place)] = place
        return list(found.values())

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

    def sizes(self, nodes: Iterable[Any]) -> list[int]:
        """The bytes of the storages that nodes have saved tensors in, in memory or out of it."""
        return sorted(each.nbytes for each in self._find_places(list(nodes)))

    def release(self, roots: Iterable[torch.Tensor]) -> None:
        """Free what the graph behind some tensors has saved, as a completed backward would have done."""
        for node in walk(root.grad_fn for root in roots):
            for name in _names_of(node):
                for each in self.packed(node, name):
                    each.tensor = each.place = None
            for raw in _saved_by(node):
                with contextlib.suppress(RuntimeError):
                    raw.register_hooks(_drop, _gone)


def _drop(tensor: torch.Tensor) -> None:
    return None


def _gone(nothing: None) -> torch.Tensor:
    raise RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
        "been freed)."
    )


def _live_nodes() -> Iterator[Any]:
    for tensor in living_tensors():
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
