"""Many things in few words. Apart from `describe`, which needs torch: the parent says such things too."""

from __future__ import annotations


def listed(items: list[str], most: int = 4) -> str:
    """`a`, `b` and 3 more."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
