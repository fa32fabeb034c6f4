"""What a stall shows of the GPU: whether the main thread waits for it, whether it works or spins, how far it came."""

from __future__ import annotations

from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.stall import stands
from torchmedic.records import Location
from torchmedic.records.gpu import GpuState
from torchmedic.records.stall import Stall

_MAX_SHARE_OF_POWER = 0.4  # of the power limit: who computes draws more
_MIN_BUSY_PERCENT = 95  # percent
_MAX_MEMORY_PERCENT = 1  # percent of the time in which memory is touched

# What the device is at between two marks, by the mark that it has not made.
_UNDER_WAY = {"backward": "the forward pass or the loss", "update": "the backward pass"}


def waits_for_device(stall: Stall) -> bool:
    """Whether the main thread stands while work of the device is outstanding."""
    inner = stall.inner
    return inner is not None and inner.device_busy is True and stands(inner)


def gpus(stall: Stall) -> list[GpuState]:
    """The GPUs of this run, as NVML shows them; those that do something if any does."""
    known = [gpu for gpu in (stall.gpu.gpus if stall.gpu is not None else ()) if gpu.ordinal is not None]
    return [gpu for gpu in known if (gpu.utilisation or 0) > 0] or known


def spins(stall: Stall) -> bool:
    """Whether a kernel runs all the time, touches no memory, and draws hardly any power.

    A GPU that goes on from mark to mark does something, however little power that takes.
    """
    inner = stall.inner
    if inner is None or inner.marks_moved:
        return False
    busy = [gpu for gpu in gpus(stall) if (gpu.utilisation or 0) >= _MIN_BUSY_PERCENT]
    return any(
        gpu.power is not None
        and gpu.power_limit is not None
        and gpu.power < _MAX_SHARE_OF_POWER * gpu.power_limit
        and (gpu.memory_utilisation or 0) <= _MAX_MEMORY_PERCENT
        for gpu in busy
    )


def power_words(stall: Stall) -> list[str]:
    facts = []
    for gpu in gpus(stall)[:4]:
        if gpu.utilisation is not None and gpu.power is not None:
            limit = f" of {gpu.power_limit:.0f}" if gpu.power_limit is not None else ""
            name = f"{gpu.name or 'GPU'} {gpu.index}"
            facts.append(f"{name}: utilisation {gpu.utilisation} %, {gpu.power:.0f}{limit} W")
    return facts


def device_words(stall: Stall) -> list[str]:
    """How far the device has come, by the marks that it makes itself."""
    inner = stall.inner
    if inner is None or (inner.mark_due is None and inner.mark_made is None):
        return []
    if inner.mark_due is not None:
        what = _UNDER_WAY.get(inner.mark_due.what, f"`{inner.mark_due.what}`")
        return [f"the device is at {what} of step {inner.mark_due.step}"]
    assert inner.mark_made is not None
    return [f"the device is past all that was marked up to step {inner.mark_made.step}"]


def last_mark(stall: Stall) -> Location | None:
    """The line that the device has not come to."""
    mark = stall.inner.mark_due if stall.inner is not None else None
    if mark is None or not mark.file or not mark.line:
        return None
    return line_location("origin", mark.file, mark.line, "the device did not come to this line")
