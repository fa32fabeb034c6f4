"""The tensors of this process: which of them live, which have memory of their own, and calls that nobody sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.source.objects.living import living

_NOTHING = contextlib.nullcontext()
_use_count = getattr(torch._C, "_storage_Use_Count", None)


def unseen() -> contextlib.AbstractContextManager[Any]:
    """A context in which dispatch modes of the user's see no operation."""
    return torch._C._DisableTorchDispatch() if torch._C._len_torch_dispatch_stack() else _NOTHING


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Calls without graph, without autocast, and unseen by modes of the user's."""
    with torch.no_grad(), unseen(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        yield


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one with a storage that can be parked."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
        return False
    return (tensor.is_cuda or tensor.is_cpu) and tensor.layout is torch.strided


def is_unshared(tensor: torch.Tensor) -> bool:
    """Whether the memory belongs to this tensor alone, so that nobody sees a change."""
    storage = tensor.untyped_storage()
    # One use is the tensor's, one is that of the storage here.
    return _use_count is not None and _use_count(storage._cdata) == 2 and storage.nbytes() == tensor.nbytes


def parameter_storages() -> frozenset[int]:
    """The storages of all parameters that live, which are never parked."""
    return frozenset(
        int(each.untyped_storage()._cdata)
        for each in living(torch.Tensor)
        if isinstance(each, torch.nn.Parameter) and each.layout is torch.strided
    )
