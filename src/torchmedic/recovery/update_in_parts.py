"""Updates in parts: an optimizer with `foreach` makes temporary tensors of the size of all its weights at once.

Each weight is updated by itself, so torch's own functions are called for some weights at a time. The results are the
same bit for bit: the kernels work on single elements, or on one weight.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchmedic.recovery.room import UNUSABLE_SHARE, in_use_and_limit

_PREFIX = "_multi_tensor_"
_TEMPORARIES = 4  # copies of the weights in a part
_MIN_PART_BYTES = 16 << 20


def foreach_updates() -> Iterator[tuple[Any, str]]:
    """The functions of torch that update many weights at once: module and name of each."""
    modules = [each for name, each in sys.modules.items() if name.startswith("torch.optim.")]
    for module in modules:
        for name in vars(module):
            if name.startswith(_PREFIX) and getattr(module, name).__module__ == module.__name__:
                yield module, name


def in_parts(update: Callable[..., None], is_short: Callable[[], bool]) -> Callable[..., None]:
    """The function, called for some weights at a time while memory is short."""

    @functools.wraps(update)
    def update_in_parts(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        parts = _parts(params) if is_short() and not torch.compiler.is_compiling() else []
        if len(parts) < 2:
            update(params, *args, **kwargs)
            return
        for part in parts:
            some = [_some(each, part, len(params)) for each in args]
            named = {name: _some(each, part, len(params)) for name, each in kwargs.items()}
            update(params[part], *some, **named)
            for whole, piece in zip([*args, *kwargs.values()], [*some, *named.values()], strict=True):
                if piece is not whole:
                    whole[part] = piece  # momentum buffers are made on the way

    return update_in_parts


def _some(value: Any, part: slice, count: int) -> Any:
    """The part of a list that has an item for each weight."""
    return value[part] if isinstance(value, list) and len(value) == count else value


def _parts(params: list[torch.Tensor]) -> list[slice]:
    """The weights in runs that the free memory is enough for."""
    memory = in_use_and_limit(params[0].device) if params else None
    if memory is None:
        return []
    free = int((1 - UNUSABLE_SHARE) * memory[1]) - memory[0]
    allowed = max(free // _TEMPORARIES, _MIN_PART_BYTES)
    parts, start, nbytes = [], 0, 0
    for index, each in enumerate(params):
        if nbytes and nbytes + each.nbytes > allowed:
            parts.append(slice(start, index))
            start, nbytes = index, 0
        nbytes += each.nbytes
    return [*parts, slice(start, len(params))]
