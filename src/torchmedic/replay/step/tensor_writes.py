"""Tensors that a replayed step writes to in place, put back afterwards.

Most steps write to few: the optimizer is held back. Code that perturbs or normalises weights, updates a running average
or changes its batch does, so what was there before the replay is copied at the first write to it, and not before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchmedic.replay.isolation.torch_state import set_version
from torchmedic.replay.trace.microscope import written_by
from torchmedic.replay.trace.operations import Geometry, geometry_of, storage_of


class RestoreWrites(TorchDispatchMode):
    """On exit every tensor that is older than the replay is what it was, version and all."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._tensors = {id(tensor): tensor for tensor in weights if tensor.layout is torch.strided}
        self._versions = {key: tensor._version for key, tensor in self._tensors.items() if not tensor.is_inference()}
        self._watched = {key for tensor in self._tensors.values() if (key := storage_of(tensor)) is not None}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._others: dict[tuple[int, Geometry], tuple[torch.Tensor, torch.Tensor]] = {}
        self._born: set[int] = set()  # memory that the replay itself has made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and not _changes_nothing(func, args):
            for tensor in written_by(func, args, kwargs):
                self._keep(tensor)
        result = func(*args, **kwargs)
        made = _storages(result)
        if made:
            self._born |= made - _storages((args, kwargs))
        return result

    def _keep(self, tensor: torch.Tensor) -> None:
        key = storage_of(tensor)
        if key in self._watched:
            if key not in self._copies:
                storage = tensor.untyped_storage()
                self._copies[key] = (storage, storage.clone())
        elif key is not None and key not in self._born and tensor.layout is torch.strided and not tensor.is_meta:
            place = (key, geometry_of(tensor))  # of a view of something big, that part alone
            if place not in self._others:
                view = tensor.detach()
                self._tensors.setdefault(id(tensor), tensor)
                if not tensor.is_inference():
                    self._versions.setdefault(id(tensor), tensor._version)
                self._others[place] = (view, view.clone())

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call,unused-ignore]
        for storage, copy in self._copies.values():
            storage.copy_(copy)
        with torch.no_grad():
            for view, before in reversed(self._others.values()):
                view.copy_(before)
        self._copies.clear()
        self._others.clear()
        moved = [
            (tensor, version)
            for key, version in self._versions.items()
            if (tensor := self._tensors[key])._version != version
        ]
        for tensor, version in moved:
            with contextlib.suppress(Exception):
                set_version(tensor, version)


def _storages(values: Any) -> set[int]:
    found = (storage_of(value) for value in tree_iter(values) if isinstance(value, torch.Tensor))
    return {key for key in found if key is not None}


def _changes_nothing(func: Any, args: Any) -> bool:
    """The write by which a held-back optimizer shows that it would have written."""
    return func._schema.name == "aten::mul_" and len(args) == 2 and isinstance(args[1], int) and args[1] == 1
