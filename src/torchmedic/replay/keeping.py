"""Weights that a replayed step writes to in place, put back afterwards.

Most steps write to none: the optimizer is held back. Code that perturbs, normalises or updates the weights by hand
does, so each is copied at the first write to it, and not before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchmedic.replay.microscope import written_by
from torchmedic.replay.storages import storage_of


class KeptWeights(TorchDispatchMode):
    """On exit these tensors are what they were, version and all."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._tensors = {id(tensor): tensor for tensor in tensors if tensor.layout is torch.strided}
        self._versions = {key: tensor._version for key, tensor in self._tensors.items() if not tensor.is_inference()}
        self._watched = {key for tensor in self._tensors.values() if (key := storage_of(tensor)) is not None}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and not _changes_nothing(func, args):
            for tensor in written_by(func, args, kwargs):
                key = storage_of(tensor)
                if key in self._watched and key not in self._copies:
                    storage = tensor.untyped_storage()
                    self._copies[key] = (storage, storage.clone())
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call,unused-ignore]
        for storage, copy in self._copies.values():
            storage.copy_(copy)
        self._copies.clear()
        moved = [
            (tensor, version)
            for key, version in self._versions.items()
            if (tensor := self._tensors[key])._version != version
        ]
        if moved:
            with contextlib.suppress(Exception):
                tensors, versions = zip(*moved, strict=True)
                torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def _changes_nothing(func: Any, args: Any) -> bool:
    """The write by which a held-back optimizer shows that it would have written."""
    return func._schema.name == "aten::mul_" and len(args) == 2 and isinstance(args[1], int) and args[1] == 1
