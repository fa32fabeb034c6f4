"""What the keys of a dict are: values that may come again, or objects that nobody may have any more."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

_ONLY = 3  # references to the key of a dict: that of the dict, and two of the question


def keys_of(container: dict[Any, Any]) -> str:
    """See `Held.keys`. The keys of a cached function are tuples of its arguments."""
    if not dict.__len__(container):
        return ""
    key = next(dict.__reversed__(container))
    parts = key if type(key) is tuple else (key,)
    if not any(_is_object(part) for part in parts):
        return ""
    del key, parts
    first = next(dict.__iter__(container))
    if type(first) is not tuple:
        return "lost" if sys.getrefcount(first) <= _ONLY and not isinstance(first, weakref.ref) else "objects"
    return "lost" if any(_is_object(part) and sys.getrefcount(part) <= _ONLY for part in first) else "objects"


def _is_object(key: Any) -> bool:
    own = getattr(type(key), "__hash__", None)
    return own is object.__dict__["__hash__"] or isinstance(key, torch.Tensor | weakref.ref)
