"""Whether the device is still at work and how far it has come, asked without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch

from torchmedic.observe.context import ProcessContext
from torchmedic.records.inside import MarkView

_INTERVAL_SECONDS = 0.3  # between the two looks


def in_use() -> bool:
    """Whether this process has started CUDA. To ask more of one that has not would start the driver."""
    return bool(torch.cuda.is_initialized())


def state(agent: ProcessContext | None = None) -> dict[str, Any]:
    """`device_busy`: whether work was outstanding at both looks; `allocator_retries`: of the run so far.

    Their rate is that between the looks, per second.
    """
    if not in_use():
        return {}
    devices = _devices()
    made, _ = _marks(agent)
    began, first = time.monotonic(), sum(_retries(device) for device in devices)
    before = any(_is_busy(device) for device in devices)
    if before or first:
        time.sleep(_INTERVAL_SECONDS)
    busy = before and any(_is_busy(device) for device in devices)
    mark_made, mark_due = _marks(agent)
    retries = sum(_retries(device) for device in devices)
    return {
        "device_busy": busy,
        "allocator_retries": retries,
        "allocator_retry_rate": (retries - first) / max(time.monotonic() - began, _INTERVAL_SECONDS),
        "architectures": tuple(torch.cuda.get_arch_list()),
        "gpus": tuple((torch.cuda.get_device_name(each), torch.cuda.get_device_capability(each)) for each in devices),
        "mark_made": mark_made,
        "mark_due": mark_due,
        "marks_moved": mark_made != made if mark_made is not None else None,
    }


def _devices() -> list[int]:
    """The devices that this process uses: asking another one would start it."""
    started = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if started is None:
        return [torch.cuda.current_device()]
    return [device for device in range(torch.cuda.device_count()) if started(device)]


def _is_busy(device: int) -> bool:
    return not torch.cuda.default_stream(device).query()


def _retries(device: int) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _marks(agent: ProcessContext | None) -> tuple[MarkView | None, MarkView | None]:
    if agent is None:
        return None, None
    made, due = agent.marks.last()
    return _view(made), _view(due)


def _view(mark: Any) -> MarkView | None:
    return None if mark is None else MarkView(what=mark.what, step=mark.step, file=mark.file, line=mark.line)
