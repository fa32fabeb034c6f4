"""The parts of parameters that a rank keeps of a model under `fully_shard`."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

SYNC_SWITCH = "set_requires_gradient_sync"


def shards_of(roots: Iterable[nn.Module], wanted: Collection[int]) -> list[Any]:
    """The parts, of all modules under `fully_shard`, that are among the wanted identities."""
    modules = {id(module): module for root in roots for module in root.modules()}
    found: list[Any] = []
    for module in modules.values():
        if not hasattr(type(module), SYNC_SWITCH):
            continue
        with contextlib.suppress(AttributeError):  # private, and unlike in other versions of torch
            state = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            found += [each.sharded_param for group in groups if group is not None for each in group.fsdp_params]
    return [each for each in found if id(each) in wanted]
