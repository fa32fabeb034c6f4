"""Sizes, times and lists as a person writes them."""

from __future__ import annotations

from torchmedic.records import Phase

_DOING: dict[Phase, str] = {
    "other": "",
    "data": ", while it waits for data",
    "forward": ", in the forward pass",
    "backward": ", in the backward pass",
    "optimizer": ", in the optimizer",
}


def size(count: int) -> str:
    """Bytes: `1.5 GiB`."""
    for unit, power in (("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"


def duration(seconds: float) -> str:
    """Seconds: `20 ms`, `1.5 s`, `3 min`, `2.5 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def listed(items: list[str], most: int = 4) -> str:
    """`a`, `b` and 3 more."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def at_moment(step: int, phase: Phase) -> str:
    """`in step 20, in the backward pass`."""
    return f"in step {step}{_DOING[phase]}"
