"""Whether the device is still at work, asked without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch

_BETWEEN = 0.3


def state() -> dict[str, Any]:
    """`device_busy`: whether work was outstanding at both looks; `allocator_retries`: of the run so far."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    devices = range(torch.cuda.device_count())
    before = any(_is_busy(device) for device in devices)
    if before:
        time.sleep(_BETWEEN)
    return {
        "device_busy": before and any(_is_busy(device) for device in devices),
        "allocator_retries": sum(_retries(device) for device in devices),
    }


def _is_busy(device: int) -> bool:
    return not torch.cuda.default_stream(device).query()


def _retries(device: int) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
