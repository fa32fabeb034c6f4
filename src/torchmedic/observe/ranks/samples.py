"""Short values for batches, weights, devices and lines of one rank, to be compared with those of other ranks."""

from __future__ import annotations

import hashlib
import os
from types import FrameType
from typing import Any

import torch

from torchmedic.observe.step.tensors import tensors_in
from torchmedic.records import StackFrame
from torchmedic.source.objects.finite import has_values
from torchmedic.source.user_code import is_user_file

_MAX_TENSORS = 4  # of a batch
_SAMPLED_ELEMENTS = 64  # of a tensor of a batch
_MAX_DATASETS = 4  # one around another
_SAMPLED_WEIGHTS = 1024  # elements of one weight


def fingerprint_of(batch: Any) -> str:
    """A text that is equal for equal batches; empty where nothing can be read without a wait."""
    digest = hashlib.blake2b(digest_size=12)
    read = 0
    for tensor in tensors_in(batch)[:_MAX_TENSORS]:
        if (
            not has_values(tensor)
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or not tensor.numel()
            or tensor.is_quantized
        ):
            continue
        flat = _flat(tensor)
        every = max(1, flat.numel() // _SAMPLED_ELEMENTS)
        sample = flat[::every][:_SAMPLED_ELEMENTS]
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}{sample.tolist()}".encode())
        read += 1
    return digest.hexdigest() if read else ""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one row; of a tensor that would have to be copied for that, its first part."""
    plain = tensor.detach()
    return plain.view(-1) if plain.is_contiguous() else plain[0].reshape(-1)


def size_of(tensor: torch.Tensor) -> float:
    """The sum of the magnitudes of some elements."""
    flat = _flat(tensor)
    sample = flat[:: max(1, flat.numel() // _SAMPLED_WEIGHTS)][:_SAMPLED_WEIGHTS]
    return float(sample.abs().sum(dtype=torch.float64).item())


def identity_of(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", "") or f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{device.index}")


def line_of(frame: FrameType | None) -> StackFrame | None:
    if frame is None:
        return None
    return StackFrame(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)


def stream_of(iterator: Any) -> StackFrame | None:
    """The `__iter__` of the user's IterableDataset that a loader reads, also where a library has wrapped it."""
    dataset = getattr(iterator, "_dataset", None)
    for _ in range(_MAX_DATASETS):
        if not isinstance(dataset, torch.utils.data.IterableDataset):
            break
        code = getattr(type(dataset).__iter__, "__code__", None)
        if code is not None and is_user_file(code.co_filename):
            return StackFrame(file=code.co_filename, line=code.co_firstlineno, function=code.co_name)
        dataset = getattr(dataset, "dataset", None)
    return None
