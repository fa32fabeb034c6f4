"""The tensors among the arguments and results of an operation, which lie flat or in a list: no deeper nesting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Exchange = Callable[[Any], Any]


def tensors_of(args: Any, kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """All tensors in the arguments of an operation, in order."""
    found: list[torch.Tensor] = []
    for value in (*_several(args), *(kwargs.values() if kwargs else ())):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found


def exchanged(args: Any, kwargs: Mapping[str, Any], exchange: Exchange) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with every value exchanged."""
    return tuple(_one(value, exchange) for value in args), {
        name: _one(value, exchange) for name, value in kwargs.items()
    }


def _one(value: Any, exchange: Exchange) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([exchange(each) for each in value]) if type(value) in (list, tuple) else value
    return exchange(value)


def _several(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)
