"""Objects of the user's in a few words: never slow, never a whole tensor, never code of theirs."""

from __future__ import annotations

import inspect
import os
from types import FrameType
from typing import Any

import torch

from torchmedic import contained
from torchmedic.source.syntax import is_module

_MAX_TEXT = 2000  # characters
_MAX_ITEMS = 8
_MAX_VARIABLES = 6
_MAX_INTEGER = 1 << 63


def text_of(error: BaseException) -> str:
    """What an exception says, even one that cannot say it."""
    return _clean(contained.text_of(error))[:_MAX_TEXT]


def plain(value: Any) -> Any:
    """An index as something that can be written to JSON."""
    try:
        if hasattr(value, "item") and (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1:
            value = value.item()
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return value if -_MAX_INTEGER <= value < _MAX_INTEGER else str(value)
        if isinstance(value, str):
            return _clean(value)[:200]
        if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
            return [plain(item) for item in value]
        return _clean(repr(value))[:200]
    except Exception:
        return f"<{type(value).__name__}>"


def shape_of(sample: Any, depth: int = 3) -> str:
    """The shape of a sample as a person would write it: `([3, 32, 32], int)`."""
    try:
        if isinstance(sample, torch.Tensor) or (hasattr(sample, "shape") and hasattr(sample, "dtype")):
            return str(list(sample.shape))
        if depth and isinstance(sample, dict):
            items = [f"{key}: {shape_of(item, depth - 1)}" for key, item in list(sample.items())[:_MAX_ITEMS]]
            return "{" + _clean(", ".join(items)) + "}"
        if depth and isinstance(sample, list | tuple):
            if isinstance(sample, list) and sample and isinstance(sample[0], int | float | str):
                return f"list of {len(sample)}"
            items = [shape_of(item, depth - 1) for item in sample[:_MAX_ITEMS]]
            return "(" + ", ".join(items) + (", ..." if len(sample) > _MAX_ITEMS else "") + ")"
    except Exception:
        return type(sample).__name__
    return type(sample).__name__


def variables_of(frame: FrameType) -> str:
    """The variables of a function where it failed: `index = 17, path = 'a/17.png', image = [3, 32, 30] float32`."""
    if is_module(frame.f_code):
        return ""
    shown = []
    for name, value in list(frame.f_locals.items()):
        if name in ("self", "cls") or name.startswith(("__", ".")) or callable(value) or inspect.ismodule(value):
            continue
        shown.append(f"{name} = {_short(value)}")
        if len(shown) == _MAX_VARIABLES:
            break
    return ", ".join(shown)


def _short(value: Any) -> str:
    try:
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return _clean(repr(value[:60] if isinstance(value, str | bytes) else value))[:80]
        if isinstance(value, os.PathLike):
            return _clean(repr(os.fspath(value)))[-80:]
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, list | tuple | dict | set):
            return f"{type(value).__name__} of {len(value)}"
    except Exception:
        return type(value).__name__
    return type(value).__name__


def _clean(text: str) -> str:
    """Text that JSON can hold."""
    return text.encode("utf-8", "replace").decode()
