"""Memory of a device that somebody else than torch's allocator asked for: the driver, cuBLAS, NCCL."""

from __future__ import annotations

import contextlib

import msgspec
import torch

from torchmedic.detect.failures.exhaustion import Exhaustion

LITTLE = 256 << 20  # bytes: less than the handle and workspace of cuBLAS, or a plan of cuDNN, may ask for


def free_on_device(index: int | None = None) -> tuple[int, int] | None:
    """Free bytes and all bytes of a device; None where it cannot be asked."""
    with contextlib.suppress(RuntimeError, AssertionError, AttributeError):
        free, total = torch.cuda.mem_get_info(index)
        return int(free), int(total)
    return None


def asked_beside(said: Exhaustion) -> Exhaustion | None:
    """Add what the device says to an exception that names no number.

    None where a library complains though there is room: it says so of other failures too. The driver means what it
    says, and what it lacked may be free again by now.
    """
    index = said.index
    if index is None and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError, AssertionError):
            index = torch.cuda.current_device()
    room = free_on_device(index)
    if room is None:
        return said if said.beside not in ("cuBLAS", "cuDNN", "a CUDA library") else None
    if room[0] > LITTLE and said.beside in ("cuBLAS", "cuDNN", "a CUDA library"):
        return None
    return msgspec.structs.replace(said, index=index, free=room[0], capacity=room[1])
