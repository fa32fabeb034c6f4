"""What a process is at that takes long by its nature: compiling, saving, tuning, a job of several ranks."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch

from torchmedic.observe.inside.peek import variables
from torchmedic.records.inside import JobView

_SAVING = os.path.join("torch", "serialization.py")
_MAX_ENTRIES = 100_000  # of a state that are counted
_LATEST = 16


def facts(frames: list[FrameType]) -> dict[str, Any]:
    """Fields of `InsideView`; `frames` are those of the main thread."""
    return {
        "compiles": _compiles(),
        "state_bytes": _state_bytes(frames),
        "tunes": bool(torch.backends.cudnn.benchmark),
        "job": _job(),
    }


def _compiles() -> tuple[float, ...]:
    """How long earlier compilations of torch.compile took, in seconds."""
    known = getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {})
    for name in ("_compile.compile_inner", "_compile"):
        if name in known:
            return tuple(float(seconds) for seconds in list(known[name])[-_LATEST:])
    return ()


def _job() -> JobView | None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return JobView(
        backend=str(distributed.get_backend()), rank=distributed.get_rank(), world_size=distributed.get_world_size()
    )


def _state_bytes(frames: list[FrameType]) -> int | None:
    """The size of what `torch.save` was given."""
    for frame in frames:
        if frame.f_code.co_name == "save" and frame.f_code.co_filename.endswith(_SAVING):
            with variables(frame) as known:
                return _size(known.get("obj"))
    return None


def _size(state: Any) -> int:
    """The bytes of the tensors in nested containers, each storage once. No code of the user's is run."""
    storages: dict[int, int] = {}
    waiting, seen = [state], 0
    while waiting and seen < _MAX_ENTRIES:
        value = waiting.pop()
        seen += 1
        if isinstance(value, torch.Tensor):
            _count(value, storages)
        elif isinstance(value, dict):
            waiting.extend(dict.values(value))
        elif isinstance(value, list | tuple):
            waiting.extend(value[:_MAX_ENTRIES])
        elif isinstance(value, torch.nn.Module):
            waiting.extend(value.__dict__.get(group) for group in ("_parameters", "_buffers", "_modules"))
    return sum(storages.values())


def _count(tensor: torch.Tensor, storages: dict[int, int]) -> None:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        storages[int(storage._cdata)] = storage.nbytes()
