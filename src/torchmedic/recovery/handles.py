"""The handle that a node of the graph keeps in place of a saved tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from torchmedic.recovery.living_tensors import unseen
from torchmedic.recovery.places import Backward, Place

_NOTHING = torch.empty(0)


class SavedTensor:
    """What a node of the graph keeps instead of a tensor, or what a recipe keeps as a source."""

    __slots__ = (
        "__weakref__",
        "_backward",
        "_device",
        "_held_version",
        "_kind",
        "_original",
        "_version",
        "before_use",
        "freed",
        "place",
        "tensor",
    )
    asked: ClassVar[list[SavedTensor] | None] = None  # who is asked for a tensor, while only that is of interest

    def __init__(
        self, tensor: torch.Tensor, backward: Backward, place: Place | None = None, original: torch.Tensor | None = None
    ) -> None:
        """Stand for a tensor.

        Args:
            tensor: As the node has saved it.
            backward: The passes that will ask for it.
            place: Where its contents are, if they do not stay in memory.
            original: The tensor of the script, if the node has saved its own result: the script may change it.
        """
        self._backward = backward
        self._version = tensor._version
        self._original = weakref.ref(tensor if original is None else original)
        self.freed: int | None = None  # where fetches begin: bytes that are free again when backward comes here
        self.before_use: Callable[[torch.Tensor], None] | None = None
        self.place: Place | None = None
        self.tensor: torch.Tensor | None = tensor
        if place is not None:
            self.lies_in(place)
            self.tensor = None
        elif tensor.grad_fn is not None:  # without its graph: a node that saves its own result would keep itself alive
            with unseen():
                self.tensor = tensor.detach()
        self._held_version = self._version

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

    @property
    def key(self) -> int:
        """The key of the storage."""
        if self.place is not None:
            return self.place.key
        return 0 if self.tensor is None else int(self.tensor.untyped_storage()._cdata)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in a storage, with the offset and the strides that it had."""
        return torch.empty(0, dtype=self._kind[0], device=self._device).set_(storage, *self._kind[1:])

    def become(self, other: SavedTensor) -> None:
        """Stand for the tensor that another handle stands for."""
        for name in set(self.__slots__) - {"__weakref__"}:
            if hasattr(other, name):
                setattr(self, name, getattr(other, name))
        if self.place is not None:
            self.place.tensors.append(weakref.ref(self))

    def put_back(self, storage: torch.UntypedStorage) -> None:
        """Hold the tensor again, in a storage that lives on."""
        self.tensor = self.on(storage)
        self._held_version = self.tensor._version

    @property
    def address(self) -> int:
        """Where the tensor lies; 0 while it is not in memory."""
        return 0 if self.tensor is None else self.tensor.data_ptr()

    def unpack(self) -> torch.Tensor:
        """The tensor for the node that keeps the handle.

        Raises:
            RuntimeError: The tensor was changed in place.
        """
        if SavedTensor.asked is not None:
            SavedTensor.asked.append(self)
            return _NOTHING
        if self.freed is not None:
            self._backward.fetch_ahead(freed=self.freed)
        tensor = self.value()
        if self.before_use is not None:
            self.before_use(tensor)
        return tensor

    def value(self) -> torch.Tensor:
        """The tensor, from wherever it is.

        Raises:
            RuntimeError: The tensor was changed in place. Autograd checks only tensors without hooks.
        """
        for living, version in ((self._original(), self._version), (self.tensor, self._held_version)):
            if living is not None and living._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{living.type()} {list(living.shape)}] is at version {living._version}; expected version "
                    f"{version} instead. Hint: enable anomaly detection to find the operation that failed to "
                    "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
                )
        if self.tensor is not None:
            return self.tensor
        if self.place is None:
            return gone(None)
        with unseen():
            return self.on(self.place.storage())


def unpack(saved: Any) -> Any:
    return saved.unpack()


def gone(nothing: None) -> torch.Tensor:
    raise RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
        "been freed)."
    )
