"""Hooks for saved tensors that are in force: those of `saved_tensors_hooks`, `save_on_cpu` and checkpoints.

torch 2.6 has no way to ask for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_top: Callable[[bool], tuple[Any, Any] | None] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost pair of pack and unpack hooks; None where there is none, or where torch cannot tell."""
    return _top(True) if _top is not None else None
