"""What a tensor is that a step only reads: a weight, a buffer, a part of the batch; and what the user calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchmedic.replay.step.runner import Runner
from torchmedic.replay.trace.operations import storage_of


def leaf_name(
    tensor: torch.Tensor, runner: Runner | None, batch: Iterable[torch.Tensor], variables: Mapping[str, Any]
) -> tuple[str, str]:
    """The kind of a leaf (`parameter`, `buffer`, `batch`, `tensor`) and its name, the latter empty if it has none."""
    storage = storage_of(tensor)
    if runner is not None:
        for module in runner.modules:
            for name, value in module.named_parameters():
                if storage_of(value) == storage:
                    return "parameter", name
            for name, buffer in module.named_buffers():
                if storage_of(buffer) == storage:
                    return "buffer", name
        if any(storage_of(value) == storage for value in [*runner.parameters, *runner.loose_leaves]):
            return "parameter", _variable(storage, variables)
    if any(storage_of(value) == storage for value in batch):
        return "batch", _variable(storage, variables)
    return "tensor", _variable(storage, variables)


def _variable(storage: int | None, variables: Mapping[str, Any]) -> str:
    return next(
        (name for name, value in variables.items() if isinstance(value, torch.Tensor) and storage_of(value) == storage),
        "",
    )
