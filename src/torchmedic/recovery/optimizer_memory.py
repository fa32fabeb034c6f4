"""Optimizer state and gradients that are out of memory for a while, and back when an operation uses them.

The tensor objects stay where they are; only their storages are emptied. The guard sees the arguments of every call and
brings back what is needed, so no call meets an empty storage.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchmedic.observe.step.tensors import parameters_of
from torchmedic.recovery.living_tensors import is_plain
from torchmedic.recovery.parking import Parked, ParkingSpace

_MIN_PARKED_BYTES = 4096


class OptimizerMemory:
    """The storages of the optimizers' tensors, some of them parked."""

    def __init__(self, space: ParkingSpace, before_first: Callable[[], None]) -> None:
        self._space = space
        self._before_first = before_first  # called before anything is parked: whoever reads these tensors must stop
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self.out: dict[int, tuple[Parked, weakref.ref[torch.Tensor]]] = {}  # by the storage

    def built(self, optimizer: Any) -> None:
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    @property
    def optimizers(self) -> list[Any]:
        return [found for reference in self._optimizers.values() if (found := reference()) is not None]

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(*self.optimizers)

    def park(self, wanted: int, busy: frozenset[int], *, gradients: bool) -> int:
        """Park state, and gradients if no backward can run now, until so many bytes are free.

        Returns:
            The bytes that became free.

        Raises:
            OSError: There is no room to park them.
        """
        free = 0
        for tensor in sorted(self._candidates(gradients=gradients), key=lambda each: each.nbytes, reverse=True):
            if free >= wanted:
                break
            storage = tensor.untyped_storage()
            key = int(storage._cdata)
            if key in busy or key in self.out or storage.nbytes() < _MIN_PARKED_BYTES or not storage.resizable():
                continue
            if storage.nbytes() != tensor.nbytes:  # a part of a larger piece, as in a bucket of gradients
                continue
            if not self.out:
                self._before_first()
            parked = Parked(storage, self._space)
            self.out[key] = (parked, weakref.ref(tensor, functools.partial(self._forget, key)))
            storage.resize_(0)
            free += parked.nbytes
        return free

    def _forget(self, key: int, _: object) -> None:
        self.out.pop(key, None)

    def _candidates(self, *, gradients: bool) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for optimizer in self.optimizers:
            for values in optimizer.state.values():
                for value in values.values() if isinstance(values, dict) else ():
                    if isinstance(value, torch.Tensor) and is_plain(value):
                        found[id(value)] = value
        if gradients:
            found |= {
                id(tensor.grad): tensor.grad
                for tensor in self.parameters
                if tensor.grad is not None and is_plain(tensor.grad)
            }
        return list(found.values())

    def missing(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """The storages of some tensors that are out of memory."""
        found = {}
        for tensor in tensors:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.data_ptr():
                storage = tensor.untyped_storage()
                if int(storage._cdata) in self.out:
                    found[int(storage._cdata)] = storage
        return list(found.values())

    def bring_back(self, storage: torch.UntypedStorage) -> None:
        """Fill a storage again; it stays out where there is no memory for it."""
        parked, _ = self.out[int(storage._cdata)]
        storage.resize_(parked.nbytes)
        parked.into(storage)
        del self.out[int(storage._cdata)]

    def living_out(self, *, gradients_only: bool = False) -> list[torch.UntypedStorage]:
        """The storages that are out: of everything, or of gradients."""
        tensors = [tensor for _, reference in self.out.values() if (tensor := reference()) is not None]
        if gradients_only:
            mine = {id(tensor.grad) for tensor in self.parameters if tensor.grad is not None}
            tensors = [tensor for tensor in tensors if id(tensor) in mine]
        return self.missing(tensors)
